"""memopt.nn.fuse_loss_head and memopt.patch(loss_head=True): models of transformers' forms, and its own where it is
installed."""

from __future__ import annotations

import copy
import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memopt
from memopt.nn import _deferred_logits, fuse_loss_head

CLASSES = 97


def shifted_labels(logits, labels):
    """transformers 5."""
    labels = F.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(logits.float().view(-1, CLASSES), labels.view(-1).to(logits.device))


def shifted_logits(logits, labels):
    """transformers 4, and models of others."""
    logits = logits.float()[..., :-1, :].contiguous()
    return nn.CrossEntropyLoss()(logits.view(-1, logits.size(-1)), labels[..., 1:].reshape(-1))


def not_shifted(logits, labels):
    """T5."""
    return nn.CrossEntropyLoss(ignore_index=-100)(logits.view(-1, logits.size(-1)), labels.view(-1))


def capped(logits, labels):
    """Gemma 2."""
    return shifted_labels(torch.tanh(logits / 2.0) * 2.0, labels)


def scaled(logits, labels):
    """Cohere."""
    return shifted_labels(logits * 0.3, labels)


def summed(logits, labels):
    """A Trainer with num_items_in_batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=0.1) / 50


FORMS = [shifted_labels, shifted_logits, not_shifted, capped, scaled, summed]


class Model(nn.Module):
    """A causal language model, as fuse_loss_head sees one of transformers."""

    def __init__(self, form=shifted_labels, bias=False, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(CLASSES, 16), nn.Linear(16, 16)
        self.lm_head = nn.Linear(16, CLASSES, bias=bias)
        if tied:
            self.lm_head.weight = self.embedding.weight
        self.form = form

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, tokens, labels=None):
        logits = self.lm_head(self.layer(self.embedding(tokens)).relu())
        loss = None if labels is None else self.form(logits, labels)
        return SimpleNamespace(loss=loss, logits=logits)


def batch():
    torch.manual_seed(1)
    tokens = torch.randint(CLASSES, (3, 12))
    labels = tokens.clone()
    labels[:, :4] = -100
    return tokens, labels


def step(model, *inputs, dtype=None):
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        output = model(*inputs)
    output.loss.backward()
    return output, [p.grad.clone() for p in model.parameters() if p.grad is not None]


def compare(model, *inputs, dtype=None, bound=1e-6):
    """The plain model's and the fused one's steps; then the logits, and the model without the handle."""
    expected, gradients = step(model, *inputs, dtype=dtype)
    handle = fuse_loss_head(model, chunk_bytes=2000)
    output, found = step(model, *inputs, dtype=dtype)
    assert isinstance(output.logits, _deferred_logits.DeferredLogits) and output.logits.value is None
    assert output.loss.dtype == expected.loss.dtype and output.logits.dtype == expected.logits.dtype
    torch.testing.assert_close(output.loss, expected.loss, atol=bound, rtol=bound)
    for mine, theirs in zip(found, gradients, strict=True):
        torch.testing.assert_close(mine, theirs, atol=bound, rtol=bound)
    assert torch.equal(output.logits, expected.logits)
    assert handle.remove() is model and type(model.get_output_embeddings()) is nn.Linear
    assert type(model(*inputs).logits) is torch.Tensor


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_the_plain_models(form, bias, tied):
    compare(Model(form, bias, tied), *batch())
    compare(Model(form, bias, tied), *batch(), dtype=torch.bfloat16, bound=2e-2)


def test_the_logits_never_exist():
    model, (tokens, labels) = Model(), batch()
    tokens, labels = tokens.repeat(40, 4), labels.repeat(40, 4)
    peaks = []
    for fused in (False, True):
        handle = fuse_loss_head(model, chunk_bytes=4096) if fused else None
        with memopt.profile("cpu") as profile:
            step(model, tokens, labels)
        peaks.append(profile.peak_bytes)
    assert handle is not None
    logits = tokens.numel() * CLASSES * 4
    assert peaks[0] - peaks[1] > 2 * logits


class Blocks(Model):
    """With stages, and an output that a program may keep."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])

    def forward(self, tokens, labels=None):
        return vars(super().forward(tokens, labels))


def test_they_are_not_computed_where_a_schedule_watches_its_step():
    model, (tokens, labels) = Blocks(), batch()
    expected = model(tokens, labels)["loss"]
    fuse_loss_head(model, chunk_bytes=2000)
    memopt.auto_checkpoint(
        model, {"tokens": tokens, "labels": labels}, memory_budget="1GiB", loss=lambda out: out["loss"]
    )
    for _ in range(2):
        output = model(tokens=tokens, labels=labels)
        output["loss"].backward()
        torch.testing.assert_close(output["loss"], expected)
        assert output["logits"].value is None


def test_the_plain_model_runs_in_eval_mode_without_labels_and_compiled():
    model, (tokens, labels) = Model(), batch()
    fuse_loss_head(model)
    assert type(model(tokens).logits) is torch.Tensor
    compiled = torch.compile(model, backend="aot_eager")(tokens, labels)
    assert type(compiled.logits) is torch.Tensor
    torch.testing.assert_close(compiled.loss, model(tokens, labels).loss)
    model.eval()
    assert type(model(tokens, labels).logits) is torch.Tensor


@pytest.mark.parametrize(
    "form",
    [
        lambda logits, labels: F.cross_entropy(
            logits.view(-1, CLASSES), labels.view(-1), torch.ones(CLASSES)
        ),
        lambda logits, labels: F.cross_entropy(logits.transpose(1, 2), labels),
        lambda logits, labels: not_shifted(logits + torch.ones(CLASSES), labels),
        lambda logits, labels: not_shifted(logits.tanh().tanh(), labels),
        lambda logits, labels: not_shifted(logits[:, :, :50], labels.clamp(max=49)),
        lambda logits, labels: logits.logsumexp(-1).mean(),
    ],
    ids=["class weights", "transposed", "tensor added", "two caps", "fewer classes", "another loss"],
)
def test_other_losses_compute_the_logits(form):
    model, inputs = Model(form), batch()
    expected, gradients = step(model, *inputs)
    fuse_loss_head(model)
    output, found = step(model, *inputs)
    assert torch.equal(output.loss, expected.loss)
    for mine, theirs in zip(found, gradients, strict=True):
        assert torch.equal(mine, theirs)


def test_logits_serve_any_use():
    model, inputs = Model(), batch()
    expected = model(*inputs).logits
    fuse_loss_head(model)
    logits = model(*inputs).logits
    assert logits.shape == expected.shape and logits.requires_grad and len(logits) == 3
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert logits.detach().numpy().shape == expected.shape
    (logits**2).sum().backward()
    assert model.lm_head.weight.grad is not None
    assert pickle.loads(pickle.dumps(model(*inputs).logits.detach())).equal(expected)
    with (
        pytest.raises(RuntimeError, match="before they were computed"),
        torch._C.DisableTorchFunctionSubclass(),
    ):
        model(*inputs).logits.neg()


def test_a_copy_of_the_model_has_its_own_weight():
    model, inputs = Model(), batch()
    fuse_loss_head(model)
    other = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    other(*inputs).loss.backward()
    assert other.lm_head.weight.grad is not None and model.lm_head.weight.grad is None
    assert set(other.state_dict()) == set(Model().state_dict())


def test_a_failed_forward_leaves_the_plain_model():
    model, (tokens, labels) = Model(), batch()
    fuse_loss_head(model)
    with pytest.raises(ValueError, match="expected 0 to 96"):
        model(tokens, labels + 1000)
    assert type(model(tokens).logits) is torch.Tensor


def test_models_that_cannot_be_fused_are_refused():
    model = Model()
    handle = fuse_loss_head(model)
    with pytest.raises(ValueError, match="fused already"):
        fuse_loss_head(model)
    handle.remove()
    handle.remove()
    with pytest.raises(ValueError, match="at least 1 byte"):
        fuse_loss_head(model, chunk_bytes=0)
    model.lm_head.forward = model.lm_head.forward
    with pytest.raises(TypeError, match="Linear whose forward is replaced"):
        fuse_loss_head(model)
    model.lm_head = nn.Sequential(nn.Linear(16, CLASSES))
    with pytest.raises(TypeError, match="Sequential: expected a plain"):
        fuse_loss_head(model)
    with pytest.raises(TypeError, match="Linear has no get_output_embeddings"):
        fuse_loss_head(nn.Linear(2, 2))


# ---- memopt.patch(loss_head=True) ------------------------------------------------------------------------------------


@pytest.fixture
def transformers(monkeypatch):
    """A package of transformers' names."""

    class PreTrainedModel(Model):
        pass

    module = ModuleType("transformers.modeling_utils")
    module.PreTrainedModel = PreTrainedModel
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", module)
    yield module
    memopt.disable()


def test_patch_fuses_models_of_transformers_and_disable_restores_them(transformers):
    class Causal(transformers.PreTrainedModel):
        pass

    model, (tokens, labels) = Causal(), batch()
    refused = Causal()
    refused.lm_head = nn.Sequential(refused.lm_head)
    expected = model(tokens, labels=labels)
    memopt.patch(loss_head=True)
    memopt.patch(loss_head=True)
    for _ in range(2):
        output = model(tokens, labels=labels)
        assert isinstance(output.logits, _deferred_logits.DeferredLogits)
        torch.testing.assert_close(output.loss, expected.loss)
        assert type(refused(tokens, labels=labels).logits) is torch.Tensor
    memopt.disable()
    assert "__call__" not in vars(transformers.PreTrainedModel) and type(model.lm_head) is nn.Linear
    assert type(model(tokens, labels=labels).logits) is torch.Tensor and not model._forward_hooks


def test_patch_names_a_transformers_that_is_not_imported(monkeypatch):
    monkeypatch.delitem(sys.modules, "transformers.modeling_utils", raising=False)
    with pytest.raises(ImportError, match="import your model's class before"):
        memopt.patch(loss_head=True)


# ---- transformers itself ---------------------------------------------------------------------------------------------

SMALL = {"vocab_size": CLASSES, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": CLASSES, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
GPT2 |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": CLASSES, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
T5 |= {"dropout_rate": 0, "decoder_start_token_id": 0}


@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        ("GPT2LMHeadModel", "GPT2Config", GPT2),
        ("LlamaForCausalLM", "LlamaConfig", SMALL),
        (
            "MixtralForCausalLM",
            "MixtralConfig",
            SMALL | {"num_local_experts": 2, "output_router_logits": True},
        ),
        ("Gemma2ForCausalLM", "Gemma2Config", SMALL | {"head_dim": 8, "final_logit_softcapping": 2.0}),
        ("CohereForCausalLM", "CohereConfig", SMALL | {"logit_scale": 0.3, "pad_token_id": 0}),
        ("T5ForConditionalGeneration", "T5Config", T5),
    ],
)
def test_models_of_transformers(name, config, options):
    library = pytest.importorskip(
        "transformers", reason="transformers is not installed: `make soak` runs this"
    )
    model = getattr(library, name)(getattr(library, config)(**options)).train()
    inputs = dict(zip(("input_ids", "labels"), batch(), strict=True))
    expected = model(**inputs)
    expected.loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    handle = fuse_loss_head(model, chunk_bytes=2000)
    model.zero_grad()
    output = model(**inputs)
    output.loss.backward()
    assert output.logits.value is None
    torch.testing.assert_close(output.loss, expected.loss)
    for key, theirs in gradients.items():
        torch.testing.assert_close(model.get_parameter(key).grad, theirs, atol=1e-6, rtol=1e-4)
    assert torch.equal(output.logits, expected.logits)
    handle.remove()
    assert type(model(**inputs).logits) is torch.Tensor
