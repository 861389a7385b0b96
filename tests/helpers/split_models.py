"""Blocks in the forms of the usual libraries, for tests: what each takes, gives, and does between its modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.proj(y.transpose(1, 2).reshape(rows, length, -1))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


class PreNorm(nn.Module):
    """As in GPTs written by hand; dropout by function, whose rate is the block's own."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = (
            nn.LayerNorm(WIDTH),
            Attention(True),
            nn.LayerNorm(WIDTH),
            mlp(),
        )
        self.p = 0.2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attn(self.ln1(x)), self.p, self.training)
        x = x + F.dropout(self.mlp(self.ln2(x)), self.p, self.training)
        return x


class DropPath(nn.Module):
    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.p == 0.0 or not self.training:
            return x
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.p)
        return x * mask.div_(1 - self.p)


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma


class TimmBlock(nn.Module):
    def __init__(self, drop_path: float = 0.3) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(WIDTH), Attention(), LayerScale()
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2, self.mlp, self.ls2 = nn.LayerNorm(WIDTH), mlp(), LayerScale()
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: torch.Tensor, attn_mask: torch.Tensor | None = None) -> torch.Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), mask=attn_mask)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class GPT2Block(nn.Module):
    """A tuple back, arguments by name, an assertion, a branch that is not taken, attention that gives two things."""

    class Attn(Attention):
        def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, **_: Any) -> Any:
            return super().forward(hidden_states, attention_mask), None

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(WIDTH),
            self.Attn(),
            nn.LayerNorm(WIDTH),
            mlp(),
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        past_key_values: Any = None,
        attention_mask: torch.Tensor | None = None,
        encoder_hidden_states: torch.Tensor | None = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        **kwargs: Any,
    ) -> Any:
        residual = hidden_states
        hidden_states = self.ln_1(hidden_states)
        attn_output, weights = self.attn(
            hidden_states,
            past_key_values=past_key_values,
            attention_mask=attention_mask,
            use_cache=use_cache,
            **kwargs,
        )
        hidden_states = attn_output + residual
        if encoder_hidden_states is not None:
            raise ValueError("no cross attention here")
        residual = hidden_states
        hidden_states = self.ln_2(hidden_states)
        feed_forward_hidden_states = self.mlp(hidden_states)
        hidden_states = residual + feed_forward_hidden_states
        outputs = (hidden_states,)
        if output_attentions:
            outputs += (weights,)
        return outputs


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class LlamaDecoderLayer(nn.Module):
    """Position embeddings as a pair of tensors, a gated MLP."""

    class Attn(Attention):
        def forward(
            self, hidden_states: torch.Tensor, attention_mask: Any, position_embeddings: Any, **_: Any
        ) -> Any:
            cos, sin = position_embeddings
            return super().forward(hidden_states * cos + hidden_states.flip(-1) * sin, attention_mask), None

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 2 * WIDTH)
            self.down = nn.Linear(2 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(F.silu(self.gate(x)) * self.up(x))

    def __init__(self) -> None:
        super().__init__()
        self.self_attn, self.mlp = self.Attn(), self.Gated()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(
            hidden_states=hidden_states,
            attention_mask=attention_mask,
            position_ids=position_ids,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = self.mlp(hidden_states)
        return residual + hidden_states


class BertLayer(nn.Module):
    """Post-norm; the additions are within its modules, and one of them is called by a helper, on chunks."""

    class Output(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.dense, self.dropout, self.norm = (
                nn.Linear(width, WIDTH),
                nn.Dropout(0.1),
                nn.LayerNorm(WIDTH),
            )

        def forward(self, hidden: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
            return self.norm(self.dropout(self.dense(hidden)) + inputs)

    class Attn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.self, self.output = Attention(), BertLayer.Output(WIDTH)

        def forward(self, hidden: torch.Tensor, mask: Any, head_mask: Any) -> tuple[torch.Tensor, ...]:
            return (self.output(self.self(hidden, mask), hidden),)

    def __init__(self) -> None:
        super().__init__()
        self.chunk_size_feed_forward, self.seq_len_dim = 0, 1
        self.attention, self.intermediate = self.Attn(), nn.Linear(WIDTH, 4 * WIDTH)
        self.output = self.Output(4 * WIDTH)

    def forward(self, hidden_states: torch.Tensor, attention_mask: Any = None, head_mask: Any = None) -> Any:
        outputs = self.attention(hidden_states, attention_mask, head_mask)
        attention_output, outputs = outputs[0], outputs[1:]
        return (self.chunked(attention_output), *outputs)

    def chunked(self, x: torch.Tensor) -> torch.Tensor:
        if self.chunk_size_feed_forward:
            parts = x.chunk(self.chunk_size_feed_forward, self.seq_len_dim)
            return torch.cat([self.feed_forward(part) for part in parts], self.seq_len_dim)
        return self.feed_forward(x)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.output(F.gelu(self.intermediate(x)), x)


class Stack(nn.Module):
    """A model of a head, blocks and a tail; keywords are given to every block."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.token = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 11)

    def forward(self, tokens: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        x = self.token(tokens)
        for block in self.blocks:
            x = block(x, **kwargs)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(self.norm(x))


def encoder_layer(norm_first: bool) -> nn.Module:
    return nn.TransformerEncoderLayer(
        WIDTH, HEADS, 4 * WIDTH, 0.1, batch_first=True, norm_first=norm_first, activation="gelu"
    )


def make(form: str, depth: int, rows: int = 3, length: int = 6) -> tuple[Stack, dict[str, Any]]:
    """A model of such blocks, and what it is called with."""
    forms = {
        "prenorm": PreNorm,
        "timm": TimmBlock,
        "timm without drop path": lambda: TimmBlock(0.0),
        "gpt2": GPT2Block,
        "llama": LlamaDecoderLayer,
        "bert": BertLayer,
        "torch prenorm": lambda: encoder_layer(True),
        "torch postnorm": lambda: encoder_layer(False),
    }
    model = Stack([forms[form]() for _ in range(depth)])
    sample: dict[str, Any] = {"tokens": torch.randint(0, 11, (rows, length))}
    causal = torch.full((length, length), float("-inf")).triu(1)
    if form == "timm":
        sample["attn_mask"] = causal
    elif form == "gpt2":
        sample |= {"attention_mask": causal, "use_cache": False}
    elif form == "llama":
        angles = torch.arange(length)[:, None] * torch.ones(WIDTH)
        sample |= {"attention_mask": causal, "position_embeddings": (angles.cos(), angles.sin())}
    elif form == "torch postnorm":
        sample |= {
            "src_mask": causal,
            "src_key_padding_mask": torch.arange(length).expand(rows, -1) >= length - 1,
        }
    return model, sample


FORMS = (
    "prenorm",
    "timm",
    "timm without drop path",
    "gpt2",
    "llama",
    "bert",
    "torch prenorm",
    "torch postnorm",
)
