"""A transformer encoder that classifies texts of different lengths: padding masks, workers, a checkpoint at the end of
an epoch."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--longest", type=int, default=512)
parser.add_argument("--width", type=int, default=512)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--texts", type=int, default=512)
parser.add_argument("--workers", type=int, default=2)
args = parser.parse_args()
VOCABULARY, CLASSES = 5000, 7


class Texts(Dataset):
    def __len__(self):
        return args.texts

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(args.longest // 8, args.longest, (1,), generator=generator))
        return torch.randint(1, VOCABULARY, (length,), generator=generator), index % CLASSES


def collate(batch):
    texts = pad_sequence([text for text, _ in batch], batch_first=True)
    return texts, torch.tensor([len(text) for text, _ in batch]), torch.tensor([label for _, label in batch])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, args.width, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(1, args.longest, args.width) * 0.02)
        layer = nn.TransformerEncoderLayer(args.width, args.width // 32, 4 * args.width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.head = nn.Linear(args.width, CLASSES)

    def forward(self, texts, lengths):
        padding = torch.arange(texts.shape[1], device=texts.device)[None] >= lengths[:, None]
        x = self.embedding(texts) + self.positions[:, : texts.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding)
        regular = x[~padding].pow(2).mean()  # as many rows as there are tokens
        return self.head((x * ~padding[..., None]).sum(1) / lengths[:, None]), regular


torch.manual_seed(0)
model = Classifier().cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
loader = DataLoader(
    Texts(), args.batch_size, shuffle=True, collate_fn=collate, num_workers=args.workers, pin_memory=True
)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=len(loader) + 1)
total = correct = 0
for texts, lengths, labels in loader:
    texts, lengths, labels = (part.cuda(non_blocking=True) for part in (texts, lengths, labels))
    assert lengths.max().item() == texts.shape[1]
    output, regular = model(texts, lengths)
    loss = nn.functional.cross_entropy(output, labels, label_smoothing=0.1) + 1e-4 * regular
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    optimizer.step()
    scheduler.step()
    total += labels.numel()
    correct += (output.argmax(1) == labels).sum().item()
print(f"loss {loss.item():.4f}  accuracy {correct / total:.3f}")
torch.save(model.state_dict(), "encoder.pt")
model.load_state_dict(torch.load("encoder.pt"))
