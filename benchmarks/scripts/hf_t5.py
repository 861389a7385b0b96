"""Hugging Face's T5 from its configuration, on random texts."""

import argparse

import torch
from transformers import T5Config, T5ForConditionalGeneration

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--length", type=int, default=512)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--vocabulary", type=int, default=32128)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

torch.manual_seed(0)
config = T5Config(
    vocab_size=args.vocabulary,
    d_model=args.width,
    d_ff=4 * args.width,
    num_layers=args.layers,
    num_heads=args.width // 64,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
for step in range(args.steps):
    ids = torch.randint(1, args.vocabulary, (args.batch_size, args.length)).cuda()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
