"""Checks that bare_models.py computes what Hugging Face transformers computes.

    python peers/check_models.py configs/models/gpt2-11m configs/models/llama-12m

Compares logits, loss and every gradient in fp32 on random weights (eager attention), prints one JSON line for each model,
and exits with 1 if one differs.
"""
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bare_models import build, load_config


def check(folder, seq=256):
    torch.manual_seed(0)
    hf_config = AutoConfig.from_pretrained(folder)
    theirs = AutoModelForCausalLM.from_config(hf_config, attn_implementation="eager").float().train()
    with torch.no_grad():  # fresh models have zero biases and unit norms: make every parameter matter
        for p in theirs.parameters():
            p.add_(torch.randn_like(p) * 0.02)
    ours = build(load_config(folder))
    ours.load_hf(theirs.state_dict())
    ids = torch.randint(0, hf_config.vocab_size, (2, seq))
    expected = theirs(input_ids=ids, labels=ids)
    expected.loss.backward()
    logits = ours(ids)
    loss = ours(ids[:, :-1], ids[:, 1:])
    loss.backward()
    grads = build(load_config(folder))  # the gradients of transformers, in this model's layout
    grads.load_hf({n: p.grad for n, p in theirs.named_parameters()})
    worst_grad = max(((p.grad - g).norm() / g.norm()).item()
                     for p, g in zip(ours.parameters(), grads.parameters(), strict=True))
    logits_diff = (logits - expected.logits).abs().max().item()
    loss_diff = abs(loss.item() - expected.loss.item())
    is_equal = (logits_diff < 1e-4 * max(1, expected.logits.abs().max().item())
                and loss_diff < 1e-5 and worst_grad < 1e-4)
    print(json.dumps({"model": folder, "params": sum(p.numel() for p in ours.parameters()),
                      "logits_max_abs_diff": logits_diff, "loss_abs_diff": loss_diff,
                      "grad_worst_rel_l2_diff": worst_grad, "ok": is_equal}))
    return is_equal


if __name__ == "__main__":
    sys.exit(not all([check(folder) for folder in sys.argv[1:]]))
