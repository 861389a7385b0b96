"""Hugging Face's GPT-2 from its configuration, in bfloat16 by autocast, with padded texts."""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--vocabulary", type=int, default=50257)
parser.add_argument("--one-length", action="store_true", help="of all steps; without it they grow")
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
config = GPT2Config(
    n_layer=args.layers, n_embd=args.width, n_head=args.width // 64, vocab_size=args.vocabulary
)
model = GPT2LMHeadModel(config).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
for step in range(args.steps):
    length = args.length if args.one_length else args.length * (step + 2) // (args.steps + 1)
    ids = torch.randint(5, args.vocabulary, (args.batch_size, length))
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**batch).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
