"""An epoch over images that are decoded from JPEG, resized and made a tensor: plain, by joblib.Memory and by
memopt.data.cached, all by torch's DataLoader in one process, the caches filled.

torch has one thread, as it has in DataLoader's workers: on a busy machine the threads of a collated batch wait for one
another longer than an epoch takes. The images are made here: noise over gradients, 640 x 480, so that they compress as
photographs do. Goal: an epoch from memopt's cache at least 5 times as fast as one that decodes (which is what the first
epoch is)."""

from __future__ import annotations

import io
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import joblib  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from benchmarks import harness  # noqa: E402
from memopt.data import cached  # noqa: E402

PLAIN, JOBLIB, MEMOPT = "DataLoader alone", "joblib.Memory", "memopt.data.cached"


def jpeg(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:480, 0:640]
    picture = np.stack([(x * (seed % 5 + 1) // 4 + y) % 256, y // 2, (x + seed) % 256], -1)
    noisy = np.clip(picture + rng.normal(0, 12, picture.shape), 0, 255).astype(np.uint8)
    stream = io.BytesIO()
    Image.fromarray(noisy).save(stream, "JPEG", quality=90)
    return stream.getvalue()


def decode(path: str) -> torch.Tensor:
    """uint8, 3 x 224 x 224."""
    with Image.open(path) as image:
        small = image.convert("RGB").resize((224, 224), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.asarray(small).copy()).permute(2, 0, 1).contiguous()


class Images(Dataset):
    def __init__(self, paths, load=decode):
        self.paths, self.load = paths, load

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.load(self.paths[index]), index


def epoch(dataset) -> None:
    for _ in DataLoader(dataset, batch_size=32):
        pass


def main() -> int:
    options = harness.parser(__doc__).parse_args()
    report = harness.Report("bench_cached", options)
    count = 64 if options.quick else 256
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp())
    try:
        paths = [str(folder / f"{n}.jpg") for n in range(count)]
        for n, path in enumerate(paths):
            Path(path).write_bytes(jpeg(n))
        memory = joblib.Memory(folder / "joblib", verbose=0)
        datasets = {
            PLAIN: Images(paths),
            JOBLIB: Images(paths, memory.cache(decode)),
            MEMOPT: cached(Images(paths), folder / "memopt", "4GiB"),
        }
        for dataset in datasets.values():
            epoch(dataset)
        for index in range(0, count, 7):
            expected = datasets[PLAIN][index][0]
            assert all(torch.equal(one[index][0], expected) for one in datasets.values())
        report.compare(
            f"an epoch of {count} JPEGs of 640 x 480",
            {name: lambda dataset=dataset: epoch(dataset) for name, dataset in datasets.items()},
            peer=PLAIN,
            goal={MEMOPT: 5.0},
        )
    finally:
        shutil.rmtree(folder)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
