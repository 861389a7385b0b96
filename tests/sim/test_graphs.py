"""CUDA graphs: capture into a private pool, replay of copies, fills and kernels with host bodies."""

import ctypes

import pytest
import torch

import memopt.sim

SIM = {"memory": "1GiB"}
MIB = 1 << 20


def test_capture_runs_nothing_and_replay_runs_all_of_it():
    source = torch.arange(1000, dtype=torch.int64).cuda()
    target = torch.zeros(1000, dtype=torch.int64).cuda()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        between = torch.empty_like(source)
        between.copy_(source)
        target.copy_(between)
    assert target.cpu().sum() == 0
    graph.replay()
    assert torch.equal(target.cpu(), torch.arange(1000))
    source.copy_(torch.arange(1000, 2000))
    graph.replay()
    assert torch.equal(target.cpu(), torch.arange(1000, 2000))


def test_a_capture_allocates_from_a_pool_of_its_own():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = torch.zeros(30 * MIB, dtype=torch.uint8, device="cuda")
    pools = {tuple(s["segment_pool_id"]) for s in torch.cuda.memory_snapshot() if s["total_size"] == 30 * MIB}
    assert pools == {tuple(graph.pool())}
    del inside
    graph.reset()


def test_a_synchronisation_during_capture_is_an_error():
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=r"captur|invalidated"), torch.cuda.graph(graph):
        torch.zeros(4, device="cuda").cpu()
    assert torch.zeros(4).cuda().cpu().sum() == 0


def test_graphed_callables_run_forward_and_backward():
    module = torch.nn.Linear(8, 8).cuda()
    graphed = torch.cuda.make_graphed_callables(
        module, (torch.zeros(4, 8, device="cuda", requires_grad=True),)
    )
    x = torch.zeros(4, 8, device="cuda", requires_grad=True)
    graphed(x).sum().backward()
    assert x.grad is not None
    assert module.weight.grad.shape == (8, 8)


def test_replay_runs_a_kernel_with_a_host_body_in_stream_order():
    """A replay has the arguments of the launch, on the values of its own time."""
    library = memopt.sim._control.device_library()
    image = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry add_one() { ret; }\n\0"
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    x = torch.zeros(100, dtype=torch.int32).cuda()
    assert library.cuModuleLoadData(ctypes.byref(module), image) == 0
    assert library.cuModuleGetFunction(ctypes.byref(function), module, b"add_one") == 0

    def body(args, grid, block):
        address = ctypes.c_uint64.from_address(args[0]).value
        count = ctypes.c_int32.from_address(args[1]).value
        values = (ctypes.c_int32 * count).from_address(address)
        for i in range(min(count, grid[0] * block[0])):
            values[i] += 1

    memopt.sim.emulate("add_one", body, [8, 4])

    def launch() -> None:
        address, count = ctypes.c_uint64(x.data_ptr()), ctypes.c_int32(x.numel())
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(count))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        assert library.cuLaunchKernel(function, 1, 1, 1, 64, 1, 1, 0, stream, arguments, None) == 0

    launch()
    torch.cuda.synchronize()
    assert x.cpu().tolist() == [1] * 64 + [0] * 36
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    assert x.cpu().tolist() == [1] * 64 + [0] * 36
    graph.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert x.cpu().tolist() == [3] * 64 + [0] * 36
