"""Batches of 64 rows in random order from a file of images (uint8, 3 x 224 x 224), in the page cache.

memopt.data.MmapDataset by batches of indices and by DataLoader's rows, against the same by numpy.memmap, by joblib's
dump and load, and by a tensor that is in memory, all through torch's DataLoader. Above 1 is faster than the memmap.
torch has one thread, as it has in DataLoader's workers."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import joblib  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler  # noqa: E402

from benchmarks import harness  # noqa: E402
from memopt.data import MmapDataset, MmapWriter  # noqa: E402

SHAPE = (3, 224, 224)


class Rows(Dataset):
    """Rows of an array or tensor, as tutorials write it."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return row if isinstance(row, torch.Tensor) else torch.from_numpy(np.array(row))


def by_rows(dataset) -> None:
    for _ in DataLoader(dataset, batch_size=64, shuffle=True):
        pass


def by_batches(dataset) -> None:
    for _ in DataLoader(dataset, sampler=BatchSampler(RandomSampler(dataset), 64, False), batch_size=None):
        pass


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    report = harness.Report("bench_mapped_dataset", options)
    count = 512 if options.quick else 4096
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    try:
        with MmapWriter(folder / "rows.safetensors") as out:
            for n in range(0, count, 64):
                generator = torch.Generator().manual_seed(n)
                out.extend(torch.randint(0, 256, (64, *SHAPE), dtype=torch.uint8, generator=generator))
        mapped = MmapDataset(folder / "rows.safetensors")
        held = mapped[:]
        np.save(folder / "rows.npy", held.numpy())
        joblib.dump(held.numpy(), folder / "rows.joblib")
        numpys = Rows(np.load(folder / "rows.npy", mmap_mode="r"))
        joblibs = Rows(joblib.load(folder / "rows.joblib", mmap_mode="r"))
        assert torch.equal(mapped[[3, 500]], torch.stack([numpys[3], numpys[500]]))
        report.compare(
            f"a shuffled epoch of {count} images",
            {
                "numpy.memmap": lambda: by_rows(numpys),
                "joblib.load, mapped": lambda: by_rows(joblibs),
                "a tensor in memory": lambda: by_rows(Rows(held)),
                "MmapDataset, rows": lambda: by_rows(mapped),
                "MmapDataset, batches": lambda: by_batches(mapped),
            },
            peer="numpy.memmap",
        )
    finally:
        shutil.rmtree(folder)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
