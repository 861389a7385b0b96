"""NCCL with one rank: collectives are copies, more ranks are refused."""

import ctypes

import pytest
import torch
import torch.distributed as dist
from torch import nn

from memopt.sim._coverage import library_set

SIM = {"memory": "1GiB"}


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_of_one_rank_give_its_own_values(one_rank):
    host = torch.arange(6.0)
    x = host.cuda()
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), host)
    gathered = [torch.zeros(6, device="cuda")]
    dist.all_gather(gathered, x)
    assert torch.equal(gathered[0].cpu(), host)
    scattered = torch.zeros(6, device="cuda")
    dist.reduce_scatter_tensor(scattered, x)
    assert torch.equal(scattered.cpu(), host)
    dist.broadcast(x, 0)
    dist.barrier()
    assert torch.equal(x.cpu(), host)


def test_data_parallel_training_of_one_rank_runs(one_rank):
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4).cuda())
    model(torch.ones(2, 4, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    assert model.module.weight.grad.shape == (4, 4)


def test_more_ranks_are_refused_with_the_reason():
    folder = library_set(torch.__path__[0] + "/lib")
    nccl = ctypes.CDLL(str(folder / "sim_nccl.so"))

    class Id(ctypes.Structure):
        _fields_ = [("bytes", ctypes.c_char * 128)]

    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    nccl.ncclGetLastError.restype = ctypes.c_char_p
    communicator = ctypes.c_void_p()
    assert nccl.ncclCommInitRank(ctypes.byref(communicator), 2, Id(), 0) == 5  # ncclInvalidUsage
    assert b"one rank" in nccl.ncclGetLastError(None)
