"""Golden values of models: a Hugging Face folder with random weights, and what transformers computes from it in f32.

    python peers/model_reference.py --model gpt2 --seq 40 --out golden/gpt2 \\
        --set n_layer=2 n_embd=48 n_head=4 vocab_size=96 n_positions=64

The folder gets config.json and model.safetensors; reference.safetensors with input_ids, logits, loss, train.batches and
grad.<name> (names and layout of model.safetensors); and reference.json with settings, losses of AdamW steps, and how far
fp32 is from fp64.
"""
import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

ADAMW = {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}


def build(config, state=None, attention="eager", dtype=torch.float32):
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, experts_implementation="eager")
    if state is not None:
        model.load_state_dict(state)
    return model.to(dtype).train()


def loss_of(model, ids):
    """Mean cross-entropy, and what balances experts if the config asks for it, over the positions that predict something."""
    out = model(input_ids=ids[:, :-1], use_cache=False)
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, 1), ids[:, 1:].flatten())
    if getattr(out, "aux_loss", None) is not None:
        loss = loss + model.config.router_aux_loss_coef * out.aux_loss
    return loss


def forward_backward(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    loss = loss_of(model, ids)
    loss.backward()
    return logits, loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def in_checkpoint_layout(config, tensors):
    """Saves a tensor for each parameter as if it were a weight: names and shapes become those of model.safetensors."""
    model = build(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensors[name])
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="folder with config.json, or a model_type")
    p.add_argument("--set", nargs="*", default=[], metavar="KEY=JSON", help="change fields of the config")
    p.add_argument("--out", required=True, help="folder to write")
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--seq", type=int, default=64)
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    settings = {key: json.loads(value) for key, value in (item.split("=", 1) for item in args.set)}
    if Path(args.model).is_dir():
        config = AutoConfig.from_pretrained(args.model, **settings)
    else:
        config = AutoConfig.for_model(args.model, **settings)
    config.architectures = config.architectures or [type(AutoModelForCausalLM.from_config(config)).__name__]

    model = build(config)
    with torch.no_grad():  # fresh models have zero biases and unit norms: make every parameter matter
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.02)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(torch.randn_like(buffer) * 0.02)
    out = Path(args.out)
    model.save_pretrained(out)
    state = {n: t.clone() for n, t in model.state_dict().items()}
    shape = (args.batch, args.seq)
    ids = torch.randint(0, config.vocab_size, shape)
    batches = torch.randint(0, config.vocab_size, (2, *shape))  # step s trains on batches[s % 2]

    logits, loss, grads = forward_backward(model, ids)
    # The fused kernel knows no soft cap.
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    sdpa = forward_backward(build(config, state, "eager" if is_capped else "sdpa"), ids)
    exact = forward_backward(build(config, state, dtype=torch.float64), ids)
    assert (logits - sdpa[0]).abs().max() < 1e-4 and (loss - sdpa[1]).abs() < 1e-5, "eager and sdpa disagree"

    def distance(other):
        worst = max(grads, key=lambda n: relative(grads[n], other[2][n]))
        return {"logits_max_abs_diff": (logits.double() - other[0].double()).abs().max().item(),
                "loss_abs_diff": (loss.double() - other[1].double()).abs().item(),
                "grad_worst_rel_l2_diff": relative(grads[worst], other[2][worst]), "grad_worst_name": worst}

    tensors = {"input_ids": ids, "logits": logits, "loss": loss, "train.batches": batches}
    tensors |= {"grad." + n: t for n, t in in_checkpoint_layout(config, grads).items()}
    model = build(config, state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=ADAMW["lr"], betas=tuple(ADAMW["betas"]),
                                  eps=ADAMW["eps"], weight_decay=ADAMW["weight_decay"])
    losses = []
    for step in range(args.steps):
        batch = batches[step % len(batches)]
        step_loss = loss_of(model, batch)
        optimizer.zero_grad()
        step_loss.backward()
        optimizer.step()
        losses.append(step_loss.item())
    save_file({n: t.contiguous() for n, t in tensors.items()}, out / "reference.safetensors")
    report = {"model": Path(args.model).name, "set": args.set, "torch": torch.__version__,
              "transformers": transformers.__version__, "seed": args.seed, "batch": args.batch, "seq": args.seq,
              "dtype": "float32", "attention": "eager",
              "loss_rule": "mean cross-entropy of logits[:, :-1] against input_ids[:, 1:]",
              "params": sum(p.numel() for p in model.parameters()), "loss": loss.item(),
              "distance_to_sdpa": distance(sdpa), "distance_to_fp64": distance(exact),
              "adamw": ADAMW | {"weight_decay_on": "every parameter, norms and biases too",
                                "schedule": "constant", "gradient_clipping": None,
                                "batch_of_step": "train.batches[step % 2], step from 0"},
              "train_losses": losses}
    (out / "reference.json").write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
