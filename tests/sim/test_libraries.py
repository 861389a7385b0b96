"""The simulated maths libraries under torch: cuDNN's convolutions and networks, cuSOLVER, cuFFT, cuSPARSE."""

from itertools import pairwise

import pytest
import torch
from torch import nn

import memopt.sim

SIM = {"memory": "2GiB", "blank": True, "cudnn_workspace": "32MiB"}
MIB = 1 << 20


def run(module: nn.Module, *shape: int) -> torch.Tensor:
    x = torch.zeros(*shape, device="cuda", requires_grad=True)
    out = module.cuda()(x)
    out.sum().backward()
    assert x.grad.shape == x.shape
    return out


@pytest.mark.parametrize(
    ("module", "shape", "expected"),
    [
        (lambda: nn.Conv2d(32, 64, 3), (4, 32, 32, 32), (4, 64, 30, 30)),
        (lambda: nn.Conv2d(32, 64, 3, groups=4), (4, 32, 32, 32), (4, 64, 30, 30)),
        (lambda: nn.Conv2d(32, 32, 3, groups=32), (4, 32, 32, 32), (4, 32, 30, 30)),
        (lambda: nn.Conv2d(32, 64, 3, dilation=2), (4, 32, 32, 32), (4, 64, 28, 28)),
        (lambda: nn.ConvTranspose2d(32, 64, 4, 2, 1), (4, 32, 16, 16), (4, 64, 32, 32)),
        (lambda: nn.Conv1d(80, 96, 3, padding=1), (4, 80, 300), (4, 96, 300)),
        (lambda: nn.Conv3d(3, 16, 3), (2, 3, 16, 16, 16), (2, 16, 14, 14, 14)),
    ],
)
def test_convolutions_run_through_cudnn(module, shape, expected):
    assert torch.backends.cudnn.enabled and torch.backends.cudnn.is_available()
    assert run(module(), *shape).shape == expected


def test_a_convolution_asks_for_the_workspace_that_was_set():
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    nn.Conv2d(3, 8, 3).cuda()(torch.zeros(2, 3, 16, 16, device="cuda"))
    peak = torch.cuda.max_memory_allocated() - before
    assert 32 * MIB <= peak < 33 * MIB


def test_a_workspace_that_does_not_fit_gives_way_to_a_plan_without():
    held = torch.empty(1990 * MIB, dtype=torch.uint8, device="cuda")
    x = torch.zeros(5, 3, 19, 19, device="cuda")  # a shape whose plan is not cached
    assert nn.Conv2d(3, 8, 5).cuda()(x).shape == (5, 8, 15, 15)
    del held


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_recurrent_networks_run_through_cudnn(kind, bidirectional):
    module = kind(16, 32, 2, batch_first=True, bidirectional=bidirectional).cuda()
    x = torch.zeros(4, 10, 16, device="cuda", requires_grad=True)
    out, _ = module(x)
    out.sum().backward()
    assert out.shape == (4, 10, 64 if bidirectional else 32)
    assert module.weight_hh_l1.grad.shape == module.weight_hh_l1.shape


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_weights_keep_their_values_in_cudnns_layout(kind):
    module = kind(5, 7, 2, bidirectional=True)
    with torch.no_grad():
        for i, parameter in enumerate(module.parameters()):
            parameter.fill_(i + 1)
    flat = module.cuda()._flat_weights
    starts = sorted(weight.data_ptr() for weight in flat)
    ends = {weight.data_ptr(): weight.data_ptr() + 4 * weight.numel() for weight in flat}
    assert len(set(starts)) == len(flat)
    assert all(ends[a] <= b for a, b in pairwise(starts))  # none overlaps another
    assert all(weight.is_contiguous() for weight in flat)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize(
    "operation",
    [
        torch.linalg.inv,
        torch.linalg.svd,
        torch.linalg.eigh,
        torch.linalg.qr,
        torch.linalg.lu_factor,
        torch.linalg.cholesky,
        torch.linalg.eigvalsh,
        lambda a: torch.linalg.solve(a, a),
        lambda a: torch.linalg.lstsq(a, a),
    ],
)
def test_linear_algebra_runs_and_reports_success(operation, batch):
    operation(torch.zeros(*batch, 6, 6, device="cuda"))


def test_transforms_have_the_right_shapes():
    assert torch.fft.rfft(torch.zeros(4, 1024, device="cuda")).shape == (4, 513)
    assert torch.fft.fft2(torch.zeros(4, 32, 32, device="cuda")).shape == (4, 32, 32)


def test_a_sparse_product_has_the_right_shape():
    indices = torch.tensor([[0, 1, 2], [2, 0, 1]])
    matrix = torch.sparse_coo_tensor(indices, torch.ones(3), (3, 3), is_coalesced=True).cuda()
    assert torch.sparse.mm(matrix, torch.zeros(3, 5, device="cuda")).shape == (3, 5)


def test_ops_that_torch_compiles_at_run_time_compile():
    x = torch.zeros(8, device="cuda")
    assert torch.special.bessel_j0(x).shape == (8,)
    assert torch.zeros(8, dtype=torch.cfloat, device="cuda").sqrt().shape == (8,)


@pytest.mark.parametrize("type_", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_matrix_products_of_every_type_run(type_):
    x = torch.zeros(32, 32, dtype=type_, device="cuda")
    assert (x @ x).shape == (32, 32)
    assert nn.functional.linear(x, x, x[0]).shape == (32, 32)
    assert torch.bmm(x[None], x[None]).shape == (1, 32, 32)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_runs_by_the_backend_that_the_capability_chooses(masked):
    query = torch.zeros(2, 4, 64, 32, dtype=torch.float16, device="cuda", requires_grad=True)
    mask = torch.ones(64, 64, dtype=torch.bool, device="cuda") if masked else None
    out = nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
    out.sum().backward()
    assert out.shape == query.grad.shape == (2, 4, 64, 32)
    # Flash and memory-efficient attention never hold the 64 x 64 weights: the graph names the kernel that ran.
    name = type(out.grad_fn).__name__
    assert name == (
        "ScaledDotProductEfficientAttentionBackward0" if masked else "ScaledDotProductFlashAttentionBackward0"
    )


def test_the_profiler_falls_back_to_the_host_side():
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiled:
        torch.empty(MIB, device="cuda").zero_()
    assert any(event.name == "aten::zero_" for event in profiled.events())


def test_what_is_not_simulated_is_remembered_by_name():
    library = memopt.sim._control.device_library()
    before = memopt.sim.missing_calls().get("cuMulticastCreate", 0)
    assert library.cuMulticastCreate(None, None) == 801  # CUDA_ERROR_NOT_SUPPORTED
    assert memopt.sim.missing_calls()["cuMulticastCreate"] == before + 1
