"""Times training steps of a model as Hugging Face transformers implements it; one line of JSON.

    python peers/transformers_train.py --model configs/models/mixtral-14m --batch 4 --seq 256 --threads 2 --dtype bf16

A step is forward, backward and AdamW on random tokens. With bf16, forward and backward run under autocast, as in `torch_train.py`. Of the implementations of experts
that transformers has, `--experts` chooses one.
"""
import argparse
import json
import os
import statistics
import time

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="folder with config.json")
    p.add_argument("--batch", type=int, default=4)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    p.add_argument("--experts", default="grouped_mm", choices=["eager", "batched_mm", "grouped_mm"])
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--warmup", type=int, default=3)
    p.add_argument("--forward-backward", action="store_true", help="leave out the optimizer")
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", experts_implementation=args.experts
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    seconds = []
    for step in range(args.warmup + args.steps):
        tokens = torch.randint(0, config.vocab_size, (args.batch, args.seq + 1))
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bf16"):
            logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        if not args.forward_backward:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
        if step >= args.warmup:
            seconds.append(time.perf_counter() - start)
    num_tokens = args.batch * args.seq
    print(json.dumps({
        "peer": "transformers", "version": transformers.__version__, "torch": torch.__version__,
        "model": os.path.basename(args.model.rstrip("/")), "dtype": args.dtype, "experts": args.experts,
        "threads": args.threads, "batch": args.batch, "seq": args.seq,
        "tokens_per_second_median": num_tokens / statistics.median(seconds),
        "tokens_per_second_best": num_tokens / min(seconds),
    }))


if __name__ == "__main__":
    main()
