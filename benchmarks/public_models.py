"""Models of public libraries, unmodified, with random weights and batches: what auto_checkpoint has to plan for.

Deep enough that recomputation pays (most have ten blocks or more) and small enough that a step takes a few tenths of a
second on a CPU. Nothing is downloaded. A model is built by the library named beside it; those that have none are
written here as their authors' repositories have them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.checkpoint_models import Work, classes


class Public(NamedTuple):
    """A model's builder, and the library it is from, None: torch alone.

    unet: skips span its depth as a U-Net's. batched: the first dimension of each tensor of its sample is the batch.
    """

    build: Callable[[], Work]
    library: str | None = None
    unet: bool = False
    batched: bool = True

    @property
    def installed(self) -> bool:
        return self.library is None or importlib.util.find_spec(self.library) is not None


def images(batch: int, size: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(batch, channels, size, size)


def mean_square(out: Any) -> torch.Tensor:
    return out.square().mean()


def own_loss(out: Any) -> torch.Tensor:
    loss: torch.Tensor = out["loss"]
    return loss


def tokens(batch: int, length: int, vocabulary: int = 512) -> torch.Tensor:
    return torch.randint(1, vocabulary, (batch, length))


# ---- convolutions ----------------------------------------------------------------------------------------------------


def timm(name: str, size: int, batch: int, **options: Any) -> Callable[[], Work]:
    def build() -> Work:
        model = importlib.import_module("timm").create_model(name, num_classes=10, **options)
        return Work(model, images(batch, size), classes(torch.randint(10, (batch,))))

    return build


def densenet() -> Work:
    library = importlib.import_module("torchvision.models")
    model = library.DenseNet(growth_rate=12, block_config=(6, 12, 8, 6), num_init_features=24, num_classes=10)
    return Work(model, images(8, 96), classes(torch.randint(10, (8,))))


def unet2d() -> Work:
    library = importlib.import_module("diffusers")
    model = library.UNet2DModel(
        sample_size=32,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=(32, 64, 64),
        down_block_types=("DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    sample = {"sample": images(4, 32), "timestep": torch.randint(1000, (4,))}
    return Work(model, sample, lambda out: out.sample.square().mean())


def ddpm_unet() -> Work:
    library = importlib.import_module("denoising_diffusion_pytorch")
    model = library.Unet(dim=24, dim_mults=(1, 2, 4), flash_attn=False)
    return Work(model, (images(4, 32), torch.randint(1000, (4,))), mean_square)


class DoubleConv(nn.Sequential):
    def __init__(self, before: int, after: int) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    """As in Pytorch-UNet: four levels, transposed convolutions."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.inc = DoubleConv(3, width)
        self.downs = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), DoubleConv(width << n, width << n + 1)) for n in range(4)
        )
        self.ups = nn.ModuleList(
            nn.ConvTranspose2d(width << n + 1, width << n, 2, stride=2) for n in reversed(range(4))
        )
        self.convs = nn.ModuleList(DoubleConv(width << n + 1, width << n) for n in reversed(range(4)))
        self.outc = nn.Conv2d(width, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inc(x)
        skips = []
        for down in self.downs:
            skips.append(x)
            x = down(x)
        for up, conv in zip(self.ups, self.convs, strict=True):
            x = conv(torch.cat([skips.pop(), up(x)], dim=1))
        return self.outc(x)


def unet() -> Work:
    return Work(UNet(), images(4, 96), mean_square)


def dcgan() -> Work:
    """The generator and the discriminator of torch's DCGAN example, one behind the other, at 64 pixels."""
    width = 24
    generator: list[nn.Module] = [nn.ConvTranspose2d(100, width * 8, 4, 1, 0, bias=False)]
    for n in (8, 4, 2):
        generator += [nn.BatchNorm2d(width * n), nn.ReLU(True)]
        generator += [nn.ConvTranspose2d(width * n, width * n // 2, 4, 2, 1, bias=False)]
    generator += [nn.BatchNorm2d(width), nn.ReLU(True), nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False)]
    discriminator: list[nn.Module] = [nn.Tanh(), nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(0.2, True)]
    for n in (1, 2, 4):
        discriminator += [nn.Conv2d(width * n, width * n * 2, 4, 2, 1, bias=False)]
        discriminator += [nn.BatchNorm2d(width * n * 2), nn.LeakyReLU(0.2, True)]
    discriminator += [nn.Conv2d(width * 8, 1, 4, 1, 0, bias=False), nn.Sigmoid()]
    model = nn.Sequential(nn.Sequential(*generator), nn.Sequential(*discriminator))
    return Work(
        model, torch.randn(16, 100, 1, 1), lambda out: F.binary_cross_entropy(out, torch.ones_like(out))
    )


class HifiBlock(nn.Module):
    def __init__(self, width: int, kernel: int, dilations: tuple[int, ...] = (1, 3, 5)) -> None:
        super().__init__()

        def conv(dilation: int) -> nn.Module:
            made = nn.Conv1d(width, width, kernel, dilation=dilation, padding=dilation * (kernel - 1) // 2)
            return nn.utils.weight_norm(made)

        self.convs1 = nn.ModuleList(conv(dilation) for dilation in dilations)
        self.convs2 = nn.ModuleList(conv(1) for _ in dilations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in zip(self.convs1, self.convs2, strict=True):
            x = x + second(F.leaky_relu(first(F.leaky_relu(x, 0.1)), 0.1))
        return x


class HifiGenerator(nn.Module):
    """HiFi-GAN's generator: convolutions whose weights a hook normalises (torch.nn.utils.weight_norm)."""

    def __init__(self, width: int = 64, kernels: tuple[int, ...] = (3, 7, 11)) -> None:
        super().__init__()
        self.kernels = len(kernels)
        self.conv_pre = nn.utils.weight_norm(nn.Conv1d(40, width, 7, padding=3))
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for n, rate in enumerate((4, 4, 2)):
            made = nn.ConvTranspose1d(width >> n, width >> n + 1, rate * 2, rate, padding=rate // 2)
            self.ups.append(nn.utils.weight_norm(made))
            self.resblocks.extend(HifiBlock(width >> n + 1, kernel) for kernel in kernels)
        self.conv_post = nn.utils.weight_norm(nn.Conv1d(width >> 3, 1, 7, padding=3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_pre(x)
        for n, up in enumerate(self.ups):
            x = up(F.leaky_relu(x, 0.1))
            blocks = self.resblocks[n * self.kernels : (n + 1) * self.kernels]
            x = sum(block(x) for block in blocks) / self.kernels
        return self.conv_post(F.leaky_relu(x)).tanh()


def hifigan() -> Work:
    return Work(HifiGenerator(), torch.randn(4, 40, 64), mean_square)


# ---- transformers ----------------------------------------------------------------------------------------------------


def hugging_face(
    name: str, config: str, sample: Callable[[], dict[str, Any]], **options: Any
) -> Callable[[], Work]:
    def build() -> Work:
        library = importlib.import_module("transformers")
        return Work(getattr(library, name)(getattr(library, config)(**options)), sample(), own_loss)

    return build


def language(batch: int, length: int) -> Callable[[], dict[str, Any]]:
    def sample() -> dict[str, Any]:
        ids = tokens(batch, length)
        return {"input_ids": ids, "labels": ids.clone()}

    return sample


def translation() -> dict[str, Any]:
    return {"input_ids": tokens(4, 64), "attention_mask": torch.ones(4, 64).long(), "labels": tokens(4, 64)}


def speech() -> dict[str, Any]:
    return {"input_features": torch.randn(4, 16, 128), "labels": tokens(4, 48)}


def x_transformers() -> Work:
    library = importlib.import_module("x_transformers")
    decoder = library.Decoder(dim=128, depth=10, heads=4, attn_dropout=0.1, ff_dropout=0.1)
    transformer = library.TransformerWrapper(num_tokens=512, max_seq_len=64, attn_layers=decoder)
    return Work(library.AutoregressiveWrapper(transformer), tokens(8, 64), lambda loss: loss)


def vit_pytorch() -> Work:
    library = importlib.import_module("vit_pytorch")
    model = library.ViT(
        image_size=64,
        patch_size=8,
        num_classes=10,
        dim=128,
        depth=10,
        heads=4,
        mlp_dim=512,
        dropout=0.1,
        emb_dropout=0.1,
    )
    return Work(model, images(8, 64), classes(torch.randint(10, (8,))))


class CausalBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.c_attn(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.attention(self.ln_1(x)), self.dropout, self.training)
        return x + F.dropout(self.c_out(F.gelu(self.c_fc(self.ln_2(x)))), self.dropout, self.training)


class NanoGPT(nn.Module):
    """As in nanoGPT: tied weights, the loss in what forward(idx, targets) returns."""

    def __init__(self, dim: int = 128, layers: int = 10, length: int = 64, vocabulary: int = 512) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, dim),
                "wpe": nn.Embedding(length, dim),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(CausalBlock(dim, 4, 0.1) for _ in range(layers)),
                "ln_f": nn.LayerNorm(dim, bias=False),
            }
        )
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = self.transformer
        x = parts["drop"](parts["wte"](idx) + parts["wpe"](torch.arange(idx.shape[1], device=idx.device)))
        for block in parts["h"]:  # type: ignore[attr-defined]
            x = block(x)
        logits = self.lm_head(parts["ln_f"](x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def nanogpt() -> Work:
    return Work(NanoGPT(), (tokens(8, 64), tokens(8, 64)), lambda out: out[1])


# ---- others ----------------------------------------------------------------------------------------------------------


class LstmLM(nn.Module):
    """torch's word_language_model example."""

    def __init__(self, dim: int = 128, layers: int = 2, vocabulary: int = 512) -> None:
        super().__init__()
        self.drop, self.encoder = nn.Dropout(0.2), nn.Embedding(vocabulary, dim)
        self.rnn = nn.LSTM(dim, dim, layers, dropout=0.2)
        self.decoder = nn.Linear(dim, vocabulary)
        self.decoder.weight = self.encoder.weight

    def forward(
        self, ids: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        output, hidden = self.rnn(self.drop(self.encoder(ids)), hidden)
        decoded = self.decoder(self.drop(output)).flatten(0, 1)
        return F.log_softmax(decoded, dim=1), hidden


def lstm() -> Work:
    zeros = torch.zeros(2, 16, 128)
    targets = tokens(35, 16).flatten()
    return Work(LstmLM(), (tokens(35, 16), (zeros, zeros.clone())), lambda out: F.nll_loss(out[0], targets))


class Gat(nn.Module):
    def __init__(self, conv: Any, layers: int = 10, dim: int = 16, heads: int = 4) -> None:
        super().__init__()
        widths = [32, *[dim * heads] * (layers - 1)]
        self.convs = nn.ModuleList(conv(width, dim, heads=heads, dropout=0.2) for width in widths)
        self.head = nn.Linear(dim * heads, 7)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        for conv in self.convs:
            x = F.elu(conv(F.dropout(x, 0.2, self.training), edge_index))
        return self.head(x)


def gat() -> Work:
    library = importlib.import_module("torch_geometric.nn")
    sample = torch.randn(1000, 32), torch.randint(1000, (2, 8000))
    return Work(Gat(library.GATConv), sample, classes(torch.randint(7, (1000,))))


class ActorCritic(nn.Module):
    """cleanrl's PPO agent for images: one trunk, a policy's head and a value's."""

    def __init__(self, actions: int = 6) -> None:
        super().__init__()
        self.network = nn.Sequential(
            *(nn.Conv2d(4, 32, 8, stride=4), nn.ReLU(), nn.Conv2d(32, 64, 4, stride=2), nn.ReLU()),
            *(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 7 * 7, 128), nn.ReLU()),
        )
        self.actor, self.critic = nn.Linear(128, actions), nn.Linear(128, 1)

    def forward(self, x: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.network(x / 255.0)
        chance = torch.distributions.Categorical(logits=self.actor(hidden))
        return chance.log_prob(action), chance.entropy(), self.critic(hidden)


def ppo() -> Work:
    sample = torch.randint(256, (32, 4, 84, 84)).float(), torch.randint(6, (32,))
    return Work(ActorCritic(), sample, lambda out: out[2].square().mean() - (out[0] + 0.01 * out[1]).mean())


MODELS: dict[str, Public] = {
    "U-Net": Public(unet, unet=True),
    "DDPM U-Net": Public(ddpm_unet, "denoising_diffusion_pytorch", unet=True),
    "diffusers UNet2D": Public(unet2d, "diffusers", unet=True),
    "timm ViT": Public(
        timm("vit_tiny_patch16_224", 64, 8, img_size=64, patch_size=8, embed_dim=96, depth=10), "timm"
    ),
    "vit-pytorch": Public(vit_pytorch, "vit_pytorch"),
    "timm ResNet-50": Public(timm("resnet50", 112, 6), "timm"),
    "timm ConvNeXt": Public(timm("convnext_atto", 96, 6), "timm"),
    "timm EfficientNet": Public(timm("efficientnet_b0", 96, 6), "timm"),
    "DenseNet": Public(densenet, "torchvision"),
    "T5": Public(
        hugging_face(
            "T5ForConditionalGeneration",
            "T5Config",
            translation,
            **{"vocab_size": 512, "d_model": 96, "d_kv": 24, "d_ff": 384, "num_layers": 6, "num_heads": 4},
            decoder_start_token_id=0,
        ),
        "transformers",
    ),
    "BERT": Public(
        hugging_face(
            "BertForMaskedLM",
            "BertConfig",
            language(8, 64),
            **{"vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 10, "num_attention_heads": 4},
            intermediate_size=512,
        ),
        "transformers",
    ),
    "GPT-2": Public(
        hugging_face(
            "GPT2LMHeadModel",
            "GPT2Config",
            language(8, 64),
            **{"vocab_size": 512, "n_positions": 64, "n_embd": 128, "n_layer": 10, "n_head": 4},
        ),
        "transformers",
    ),
    "Llama": Public(
        hugging_face(
            "LlamaForCausalLM",
            "LlamaConfig",
            language(8, 64),
            **{"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 10},
            **{"num_attention_heads": 4, "num_key_value_heads": 2},
        ),
        "transformers",
    ),
    "Mixtral": Public(
        hugging_face(
            "MixtralForCausalLM",
            "MixtralConfig",
            language(4, 64),
            **{"vocab_size": 512, "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 8},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4},
        ),
        "transformers",
    ),
    "x-transformers": Public(x_transformers, "x_transformers"),
    "nanoGPT": Public(nanogpt),
    "Whisper": Public(
        hugging_face(
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            speech,
            **{
                "vocab_size": 512,
                "num_mel_bins": 16,
                "d_model": 96,
                "encoder_layers": 6,
                "decoder_layers": 6,
            },
            **{"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 384},
            **{"decoder_ffn_dim": 384, "max_source_positions": 64, "max_target_positions": 64},
            **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
        ),
        "transformers",
    ),
    "LSTM LM": Public(lstm, batched=False),
    "GAT": Public(gat, "torch_geometric", batched=False),
    "DCGAN": Public(dcgan),
    "HiFi-GAN generator": Public(hifigan),
    "PPO actor-critic": Public(ppo),
}


def make(name: str) -> Work:
    """The same each time: weights, batch, loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        work = MODELS[name].build()
    work.model.train()
    return work
