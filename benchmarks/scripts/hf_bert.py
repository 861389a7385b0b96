"""Hugging Face's BERT from its configuration, masked language modelling, gradient checkpointing if asked."""

import argparse

import torch
from transformers import BertConfig, BertForMaskedLM

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--vocabulary", type=int, default=30522)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--checkpointing", action="store_true")
args = parser.parse_args()

torch.manual_seed(0)
config = BertConfig(
    num_hidden_layers=args.layers,
    hidden_size=args.width,
    num_attention_heads=args.width // 64,
    intermediate_size=4 * args.width,
    vocab_size=args.vocabulary,
)
model = BertForMaskedLM(config).cuda().train()
if args.checkpointing:
    model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4, foreach=True)
for step in range(args.steps):
    ids = torch.randint(5, args.vocabulary, (args.batch_size, args.length))
    mask = torch.ones_like(ids)
    mask[0, args.length // 2 :] = 0
    chosen = torch.rand(ids.shape) < 0.15
    labels = ids.masked_fill(~chosen | (mask == 0), -100)
    ids = ids.masked_fill(chosen, 4)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
