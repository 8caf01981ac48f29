#!/usr/bin/env python3
"""Write tests/golden: tiny random drafters with the outputs that `speculators`' own EAGLE-3 class computes for them.

Runs in an environment of its own; nothing here imports eagle_jax:

    python3 -m venv venv-golden
    venv-golden/bin/pip install torch==2.13.0          # a CPU build will do; speculators alone may fetch a CUDA one
    venv-golden/bin/pip install speculators==0.9.0 torch==2.13.0
    venv-golden/bin/python scripts/make_golden.py [tests/golden]

Every case is a folder:

    config.json, model.safetensors   the drafter as `save_pretrained` writes it (the speculators layout)
    golden.npz                       inputs and outputs, float32:
      aux       [T, A, D]   captured target states
      tokens    [T]         the token that slot t embeds
      fused     [T, H]      what `fc` returns
      logits    [k, T, U]   draft logits of step 0 .. k-1 at every slot
      feedback  [k, T, H]   the state that each of these steps feeds to the next one
    training.npz            of the cases in TRAINED only: the loss of the same class on two packed documents
      aux, tokens           as above; documents [T] of each slot
      hidden    [T, D]      final target states, each before the norm and beside the slot whose token it follows
      mask      [T]         which of them count
      norm, head            the target's final norm [D], and its head's rows for the draft vocabulary [U, D]
      loss      []          of STEPS steps, each the mean over what counts (KL from the target)
      grad:NAME             its gradient for every trained tensor, by stored name

Step j at slot t continues from slots 0 .. t of step 0: it takes the feedback of step j-1 at slot t and the token of
slot t + j, and sees its own earlier steps. That is training-time test with the data's tokens, and equally a draft from
prefix 0 .. t. The last j slots of step j have no token (the class pads with id 0); readers leave them out. In a
sliding-window case the class slides the window for step 0 only, so there a further step equals a draft only where the
window still reaches slot 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses.eager import kl_div_loss  # the default loss in torch: the fused one needs a GPU
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

STEPS = 4
LENGTH = 12
VOCAB = 24
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}


def llama(**fields) -> PretrainedConfig:
    return LlamaConfig(**{**SIZES, "rope_parameters": PLAIN_ROPE, **fields})


def qwen3(**fields) -> PretrainedConfig:
    return Qwen3Config(**{**SIZES, "rope_parameters": PLAIN_ROPE, "head_dim": 8, **fields})


def window(size: int, layers: int) -> dict:
    return {
        "use_sliding_window": True,
        "sliding_window": size,
        "max_window_layers": 0,
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention"] * layers,
    }


# name -> (nested config, top-level flags, draft vocabulary, captured layers)
CASES: dict[str, tuple[PretrainedConfig, dict[str, bool], int, int]] = {
    "eagle3": (llama(), {}, 10, 3),
    "eagle3_1": (llama(), {"fc_norm": True, "norm_output": True}, 10, 3),
    "norm_before_fc": (llama(), {"norm_before_fc": True}, 10, 3),
    "norm_before_residual": (llama(), {"norm_before_residual": True}, 10, 3),
    "recipe_default": (
        qwen3(),
        {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
        10,
        3,
    ),
    "full_vocabulary": (llama(), {"norm_output": True}, VOCAB, 3),
    "one_capture": (llama(), {"fc_norm": True}, 10, 1),
    "four_captures": (llama(), {"fc_norm": True, "norm_output": True}, 10, 4),
    "llama_biases": (llama(attention_bias=True, mlp_bias=True), {"norm_output": True}, 10, 3),
    "llama_two_layers": (llama(num_hidden_layers=2), {"fc_norm": True, "norm_output": True}, 10, 3),
    "llama3_rope": (llama(rope_parameters=LLAMA3_ROPE, max_position_embeddings=64), {}, 10, 3),
    "qwen3": (qwen3(), {}, 10, 3),
    "qwen3_two_layers_3_1": (qwen3(num_hidden_layers=2), {"fc_norm": True, "norm_output": True}, 10, 2),
    "qwen3_window": (qwen3(**window(5, 1)), {"fc_norm": True, "norm_output": True}, 10, 3),
    "qwen3_two_layers_window": (qwen3(**window(4, 2)), {}, 10, 3),
}


TRAINED = ("eagle3", "eagle3_1", "recipe_default", "qwen3_two_layers_3_1")


def build(nested: PretrainedConfig, flags: dict[str, bool], draft_vocab: int, captures: int, seed: int):
    """A drafter whose every parameter is random, norms and biases included."""
    nested._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=nested,
        draft_vocab_size=draft_vocab,
        eagle_aux_hidden_state_layer_ids=list(range(2, 2 + captures)),
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
        ),
        **flags,
    )
    model = Eagle3DraftModel(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            else:
                parameter.copy_(noise * (parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3))
    if draft_vocab != nested.vocab_size:
        chosen = torch.randperm(nested.vocab_size, generator=generator)[:draft_vocab].sort().values
        members = torch.zeros(nested.vocab_size, dtype=torch.bool)
        members[chosen] = True
        model.load_vocab_mappings(members, chosen - torch.arange(draft_vocab))
    return model, generator


def record_run(model: Eagle3DraftModel, aux: torch.Tensor, tokens: torch.Tensor) -> dict[str, np.ndarray]:
    """Run the class once over `STEPS` steps and listen to fc, the final norm and the head."""
    heard: dict[str, list[torch.Tensor]] = {"fc": [], "norm_in": [], "norm_out": [], "logits": []}
    hooks = [
        model.fc.register_forward_hook(lambda _m, _i, out: heard["fc"].append(out)),
        model.norm.register_forward_hook(lambda _m, ins, _o: heard["norm_in"].append(ins[0])),
        model.norm.register_forward_hook(lambda _m, _i, out: heard["norm_out"].append(out)),
        model.lm_head.register_forward_hook(lambda _m, _i, out: heard["logits"].append(out)),
    ]
    T = len(tokens)
    with torch.no_grad():
        model(
            hidden_states=aux.reshape(1, T, -1),
            input_ids=tokens[None],
            document_ids=torch.zeros(1, T, dtype=torch.long),
            position_ids=torch.arange(T)[None],
            ttt_steps=STEPS,
        )
    for hook in hooks:
        hook.remove()
    (fused,) = heard["fc"]
    feedback = heard["norm_out"] if model.config.norm_output else heard["norm_in"]
    return {
        "fused": fused[0].numpy(),
        "logits": torch.cat(heard["logits"]).numpy(),
        "feedback": torch.cat(feedback).numpy(),
    }


def record_training(
    model: Eagle3DraftModel, aux: torch.Tensor, tokens: torch.Tensor, generator
) -> dict[str, np.ndarray]:
    """One loss of the class, and its gradients."""
    T, D = len(tokens), aux.shape[-1]
    hidden = torch.randn(T, D, generator=generator)
    mask = torch.rand(T, generator=generator) < 0.7
    documents = torch.tensor([0] * (T // 2) + [1] * (T - T // 2))
    # The class trains on the first document's last slots with the second's tokens; such predictions are masked here.
    mask[max(T // 2 - STEPS, 0) : T // 2] = False
    mask[T // 2 : T // 2 + STEPS] = False
    with torch.no_grad():
        model.verifier_norm.weight.copy_(1 + 0.3 * torch.randn(D, generator=generator))
        head = torch.randn(model.verifier_lm_head.weight.shape, generator=generator) * 0.5
        model.verifier_lm_head.weight.copy_(head)
    model.train()
    _, loss, _ = model(
        hidden_states=aux.reshape(1, T, -1),
        input_ids=tokens[None],
        document_ids=documents[None],
        position_ids=torch.arange(T)[None],
        loss_mask=mask[None],
        verifier_last_hidden_states=hidden[None],
        ttt_steps=STEPS,
        loss_config={"kl_div": (kl_div_loss, 1.0)},
    )
    loss.backward()
    model.eval()
    gradients = {f"grad:{n}": p.grad.numpy() for n, p in model.named_parameters() if p.grad is not None}
    return {
        "aux": aux.numpy(),
        "tokens": tokens.numpy(),
        "documents": documents.numpy(),
        "hidden": hidden.numpy(),
        "mask": mask.numpy(),
        "norm": model.verifier_norm.weight.detach().numpy(),
        "head": head.numpy(),
        "loss": loss.detach().numpy(),
        **gradients,
    }


def main(destination: str) -> None:
    for seed, (name, (nested, flags, draft_vocab, captures)) in enumerate(CASES.items()):
        model, generator = build(nested, flags, draft_vocab, captures, seed)
        # Later layers have larger states, as in real targets: that is what the norms before fc are for.
        scale = torch.tensor([1.0, 3.0, 10.0, 30.0])[:captures, None]
        aux = torch.randn(LENGTH, captures, nested.hidden_size, generator=generator) * scale
        tokens = torch.randint(nested.vocab_size, (LENGTH,), generator=generator)
        outputs = record_run(model, aux, tokens)
        if not all(np.isfinite(values).all() for values in outputs.values()):
            raise SystemExit(f"{name}: the class returned NaN or infinity")
        folder = Path(destination) / name
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        np.savez_compressed(folder / "golden.npz", aux=aux.numpy(), tokens=tokens.numpy(), **outputs)
        if name in TRAINED:
            aux = torch.randn(2 * LENGTH, captures, nested.hidden_size, generator=generator) * scale
            tokens = torch.randint(nested.vocab_size, (2 * LENGTH,), generator=generator)
            np.savez_compressed(folder / "training.npz", **record_training(model, aux, tokens, generator))
        for extra in folder.iterdir():
            if extra.name not in ("config.json", "model.safetensors", "golden.npz", "training.npz"):
                extra.unlink()
        print(f"{name}: {sum(f.stat().st_size for f in folder.iterdir())} bytes")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path(__file__).parents[1] / "tests" / "golden"))
