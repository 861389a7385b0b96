"""nn.DataParallel, and why not: one process drives all devices, so that one of them also has the batch, the outputs
and every gradient, and the replicas are made anew in each forward pass. Needs two CUDA devices.

    python benchmarks/scripts/distributed/data_parallel.py
"""

import torch
from digits import BATCH
from torch import nn

WIDTH, LAYERS = 2048, 8


def main() -> None:
    count = torch.cuda.device_count()
    if count < 2:
        raise SystemExit(f"this needs two CUDA devices, and there are {count}")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS))).cuda()
    parallel = nn.DataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        parallel(torch.randn(8 * BATCH, WIDTH, device="cuda")).square().mean().backward()
        optimizer.step()
    peaks = [torch.cuda.max_memory_allocated(device) for device in range(count)]
    for device, peak in enumerate(peaks):
        print(f"cuda:{device} {peak / (1 << 20):.0f} MiB at the peak", flush=True)


if __name__ == "__main__":
    main()
