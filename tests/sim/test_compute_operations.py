"""Operations that the CPU has not, or not so, under Compute: their values and gradients are those of the CPU's way."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import memopt.sim

SIM = {"memory": "1GiB", "compute_capability": "9.0"}


def with_gradients(function, *given: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """On the CPU and on cuda: a scalar first, then the gradients of what is given."""
    answers = []
    for device in ("cpu", "cuda"):
        with memopt.sim.Compute():
            leaves = [one.clone().to(device).requires_grad_() for one in given]
            loss = function(*leaves)
            loss.backward()
            answers.append([loss.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)])
    return answers[0], answers[1]


def alike(function, *given: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    expected, got = with_gradients(function, *given)
    for one, other in zip(expected, got, strict=True):
        assert one.abs().sum() > 0
        torch.testing.assert_close(other, one, rtol=rtol, atol=atol)


@pytest.mark.parametrize("softmax", [functional.softmax, functional.log_softmax])
def test_a_softmax_of_halves_in_single_precision(softmax):
    x = torch.randn(5, 7).half()
    with memopt.sim.Compute():
        device = x.cuda().requires_grad_()
        (softmax(device, -1, dtype=torch.float32)[:, 2] ** 2).sum().backward()
        got = softmax(x.cuda(), -1, dtype=torch.float32).cpu()
    host = x.float().requires_grad_()
    (softmax(host, -1)[:, 2] ** 2).sum().backward()
    assert torch.equal(got, softmax(x.float(), -1))
    assert torch.equal(device.grad.cpu(), host.grad.half())


@pytest.mark.parametrize("own", [True, False])
def test_the_ctc_loss_by_torchs_kernel_and_by_cudnns(own):
    lengths = torch.tensor([10, 7, 5, 9], dtype=torch.int64 if own else torch.int32)
    labels = torch.randint(1, 20, (4, 10), dtype=lengths.dtype)
    if not own:  # cuDNN wants them in a row, on the CPU
        labels = torch.cat([row[:length] for row, length in zip(labels, lengths, strict=True)])

    def loss(x):
        times = torch.full((4,), 50, dtype=lengths.dtype)
        return functional.ctc_loss(x.log_softmax(-1), labels.to(x.device) if own else labels, times, lengths)

    alike(loss, torch.randn(50, 4, 20))


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_of_recurrent_networks(cell, bias):
    torch.manual_seed(0)
    host = cell(6, 5, bias=bias)

    def loss(x, *weights):
        module, state = cell(6, 5, bias=bias).to(x.device), None
        names = [name for name, _ in module.named_parameters()]
        for one in x:
            state = torch.func.functional_call(module, dict(zip(names, weights, strict=True)), (one, state))
        hidden = state[0] * state[1] if isinstance(state, tuple) else state
        return (hidden**2).sum()

    alike(loss, torch.randn(3, 4, 6), *(weight.detach() for weight in host.parameters()))


def test_a_sampled_grid_as_cudnn_samples_it():
    def loss(x, theta):
        grid = functional.affine_grid(theta, x.size(), align_corners=True)
        return (functional.grid_sample(x, grid, align_corners=True) ** 2).sum()

    alike(loss, torch.randn(2, 3, 8, 8), torch.randn(2, 2, 3) / 2)


@pytest.mark.parametrize("kernel", ["flash", "mem_efficient", "cudnn", "math"])
@pytest.mark.parametrize("groups", [1, 4])
def test_attention_by_each_kernel_with_and_without_shared_heads(kernel, groups):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = {
        "flash": SDPBackend.FLASH_ATTENTION,
        "mem_efficient": SDPBackend.EFFICIENT_ATTENTION,
        "cudnn": SDPBackend.CUDNN_ATTENTION,
        "math": SDPBackend.MATH,
    }[kernel]
    if groups > 1 and kernel == "mem_efficient":
        groups = 1  # it knows of no groups

    def loss(q, k, v):
        asked = [chosen, SDPBackend.MATH] if q.is_cuda else [SDPBackend.MATH]
        with sdpa_kernel(asked, set_priority=True):
            out = functional.scaled_dot_product_attention(
                *(one.half() if q.is_cuda else one for one in (q, k, v)),
                is_causal=True,
                enable_gqa=groups > 1,
            )
        return (out.float() ** 2).sum()

    shared = 4 // groups
    q, k, v = torch.randn(2, 4, 16, 32), torch.randn(2, shared, 16, 32), torch.randn(2, shared, 16, 32)
    alike(loss, q, k, v, rtol=2e-2, atol=2e-2)


def test_products_whose_result_has_another_type():
    a, b = torch.randn(4, 8).half(), torch.randn(8, 4).half()
    with memopt.sim.Compute():
        got = torch.mm(a.cuda(), b.cuda(), out_dtype=torch.float32)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu(), a.float() @ b.float())


@pytest.mark.parametrize("shape", [(8, 4), (8, 4, 5, 5)])
@pytest.mark.parametrize("own", [True, False])
def test_normalized_batches_in_training_and_then_in_evaluation(shape, own):
    torch.manual_seed(0)
    weight, factor = torch.rand(4) + 1, torch.randn(shape)

    def normalized(x, weight):
        mean, var = torch.zeros(4, device=x.device), torch.ones(4, device=x.device)
        arguments = mean, var, weight, torch.zeros_like(weight)
        with torch.backends.cudnn.flags(enabled=not own):
            trained = functional.batch_norm(x, *arguments, training=True)
            return ((trained + functional.batch_norm(x, *arguments)) * factor.to(x.device)).sum()

    alike(normalized, torch.randn(shape), weight, rtol=1e-4, atol=1e-5)


def test_what_the_cpu_has_in_single_precision_alone():
    x = torch.rand(6, 4)
    with memopt.sim.Compute():
        got = torch.cdist(x.half().cuda(), x.half().cuda())
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.cpu().float(), torch.cdist(x, x), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize(
    "name", ["svd", "eigh", "qr", "inv", "det", "cholesky", "pinv", "solve", "matrix_exp"]
)
def test_linear_algebra_that_the_device_cannot_run(name):
    torch.manual_seed(0)
    root = torch.randn(4, 4)
    matrix = root @ root.T + torch.eye(4)
    function = getattr(torch.linalg, name)
    more = (torch.ones(4),) if name == "solve" else ()
    with memopt.sim.Compute():
        got = function(matrix.cuda(), *(one.cuda() for one in more))
    expected = function(matrix, *more)
    pairs = [(got, expected)] if isinstance(got, torch.Tensor) else list(zip(got, expected, strict=True))
    for one, other in pairs:
        assert one.is_cuda and torch.equal(one.cpu(), other)


def test_a_call_that_is_wrong_is_told_in_the_devices_words():
    with memopt.sim.Compute(), pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.ones(3, 4, device="cuda") @ torch.ones(3, 4, device="cuda")


# ---- sparse and nested tensors -------------------------------------------------------------------------------------


def test_a_graph_convolution_on_a_sparse_adjacency():
    torch.manual_seed(0)
    edges = torch.randint(0, 10, (2, 40))
    ones = torch.ones(40)

    def loss(x, weight):
        shape = (10, 10)
        adjacency = torch.sparse_coo_tensor(edges.to(x.device), ones.to(x.device), shape).coalesce()
        assert adjacency._nnz() == len(set(map(tuple, edges.T.tolist())))
        return (torch.sparse.mm(adjacency, x @ weight) ** 2).sum()

    alike(loss, torch.randn(10, 6), torch.randn(6, 3), rtol=1e-4)


@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc", "to_sparse_coo"])
def test_sparse_layouts_there_and_back(layout):
    dense = torch.tensor([[0.0, 2.0, 0.0], [1.0, 0.0, 3.0]])
    with memopt.sim.Compute():
        sparse = getattr(dense.cuda(), layout)()
        assert sparse.layout == getattr(dense, layout)().layout
        assert torch.equal(sparse.to_dense().cpu(), dense)
        assert torch.equal(sparse.cpu().to_dense(), dense)
        assert torch.equal((sparse @ torch.eye(3, device="cuda")).cpu(), dense)


def test_a_write_to_a_sparse_tensor_is_refused_by_name():
    with memopt.sim.Compute():
        sparse = torch.eye(3).to_sparse().cuda()
        with pytest.raises(RuntimeError, match=r"in place \(aten.mul_.*without the underscore"):
            sparse.mul_(2.0)


def test_an_encoder_that_leaves_padding_out():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(3, 5, 8)
    padding = torch.tensor([[0, 0, 0, 0, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    with torch.inference_mode():
        expected = model(x, src_key_padding_mask=padding)
        with memopt.sim.Compute():
            got = model.cuda()(x.cuda(), src_key_padding_mask=padding.cuda()).cpu()
    torch.testing.assert_close(got, expected)


# ---- what is around them -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [torch.arange, torch.eye, lambda n: torch.arange(n) / 7])
def test_a_tensor_prints_its_values(make):
    host = make(20)
    with memopt.sim.Compute():
        text, large = str(host.cuda()), str(torch.cat([host.cuda()] * 100))
    assert "device='cuda:0'" in text and "".join(text.split()).startswith("".join(str(host).split())[:-1])
    assert "..." in large


def test_a_generator_of_the_devices_draws_what_one_of_its_seed_draws():
    host, device = torch.Generator().manual_seed(5), torch.Generator("cuda").manual_seed(5)
    with memopt.sim.Compute():
        for _ in range(2):
            expected = torch.randn(8, generator=host)
            assert torch.equal(torch.randn(8, generator=device, device="cuda").cpu(), expected)
            other = torch.randn(8, generator=host)
            assert torch.equal(torch.randn(8, generator=device, device="cuda").cpu(), other)
            assert not torch.equal(expected, other)
            host.manual_seed(5)
            device.manual_seed(5)


def test_an_operator_that_runs_another_is_computed_and_counted_by_that_one():
    from torch._prims import rng_prims

    from memopt._checkpoint.stages.costs import Meter

    if not hasattr(rng_prims, "run_dtensor_rng_op"):
        pytest.skip("this torch draws the random numbers of DTensors in another way")
    x, like = torch.zeros(64, device="cuda"), torch.ops.aten.rand_like.default
    with memopt.sim.Compute():
        drawn = rng_prims.run_dtensor_rng_op(0, 64, like, x)
        assert 0 < drawn.mean().item() < 1
    with Meter(torch.device("cuda")) as meter:
        kept = rng_prims.run_dtensor_rng_op(0, 64, like, x)
        assert meter.live >= kept.nbytes


def test_an_operation_without_values_is_named_with_the_remedy():
    x, mask = torch.ones(4, device="cuda"), torch.ones(4, dtype=torch.uint8, device="cuda")
    with memopt.sim.Compute(), pytest.raises(RuntimeError) as caught:
        torch.ops.aten._masked_scale(x, mask, 2.0)
    assert "aten._masked_scale" in str(caught.value) and "memopt estimate" in str(caught.value)


def test_the_capture_of_a_graph_is_refused_by_name():
    graph = torch.cuda.CUDAGraph()
    x = torch.ones(4, device="cuda")
    with memopt.sim.Compute(), pytest.raises(RuntimeError, match="aten.add.*run without CUDA graphs"):
        with torch.cuda.graph(graph):
            x + 1


def test_tensors_around_others_and_fake_ones_keep_their_own_ways():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with memopt.sim.Compute():
        jagged = torch.nested.nested_tensor(
            [torch.ones(2, 3), torch.ones(1, 3)], device="cuda", layout=torch.jagged
        )
        assert (jagged * 2).values().sum().item() == 18.0
        with FakeTensorMode():
            assert (torch.ones(4, device="cuda") + 1).shape == (4,)


EVERYWHERE = """
import threading
import memopt.sim
memopt.sim.activate("1GiB")
import torch
from memopt.sim._compute import Compute, install
install(Compute())
found = []
thread = threading.Thread(target=lambda: found.append(torch.ones(3, device="cuda").sum().item()))
thread.start()
thread.join()
compiled = torch.compile(lambda x: x * 2, fullgraph=True)
print(found, compiled(torch.ones(3, device="cuda")).sum().item())
"""


def test_installed_it_computes_in_later_threads_and_in_what_is_compiled(run_script):
    done = run_script(EVERYWHERE)
    assert done.stdout.split() == ["[3.0]", "6.0"], done.stderr
