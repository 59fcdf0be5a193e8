"""Trains a small GPT-2 or Llama with bare, fast PyTorch on the CPU or on GPUs and prints one JSON line.

    python peers/torch_train.py --model configs/models/gpt2-11m --threads 2
    torchrun --nproc-per-node 2 peers/torch_train.py --model configs/models/gpt2-11m --strategy ddp --threads 1 --batch 4
    python peers/torch_train.py --model configs/models/gpt2-11m --device cuda --dtype bf16 --compile

README.md describes the step and the fields of the line.
"""
import argparse
import json
import os
import statistics
import sys
import time
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist

from bare_models import build, load_config


def parse_args():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", required=True, help="folder with config.json")
    p.add_argument("--data", help="flat little-endian uint16 token file (default: seeded random tokens)")
    p.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU per rank")
    p.add_argument("--dtype", choices=["f32", "bf16"], default="f32", help="bf16: autocast, fp32 weights")
    p.add_argument("--compile", action="store_true", help="torch.compile (FSDP2: block by block)")
    p.add_argument("--strategy", choices=["none", "ddp", "fsdp2", "zero1"], default="none")
    p.add_argument("--batch", type=int, default=8, help="sequences per rank")
    p.add_argument("--seq", type=int, default=256)
    p.add_argument("--threads", type=int, default=0, help="threads per rank (0: cores / local ranks)")
    p.add_argument("--steps", type=int, default=20, help="timed steps")
    p.add_argument("--warmup", type=int, default=3, help="untimed steps before them")
    p.add_argument("--lr", type=float, default=3e-4)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def process_start():
    """Start of this process, or of the torchrun launcher above it, on CLOCK_BOOTTIME (Linux)."""
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    with open(f"/proc/{pid}/stat") as f:
        ticks = int(f.read().rpartition(")")[2].split()[19])
    return ticks / os.sysconf("SC_CLK_TCK")


def peak_rss():
    """Highest resident set of this process (VmHWM; getrusage would inherit the launcher's)."""
    with open("/proc/self/status") as f:
        return next(int(line.split()[1]) * 1024 for line in f if line.startswith("VmHWM"))


def batches(args, vocab, rank, world, device):
    """Batch s of rank r holds sequences (s * world + r) * batch + b, each of seq tokens, in file order."""
    if args.data:
        tokens = np.memmap(args.data, dtype="<u2", mode="r")
    else:
        dtype = np.uint16 if vocab <= 1 << 16 else np.uint32
        tokens = np.random.default_rng(args.seed).integers(0, vocab, 1 << 20, dtype=dtype)
    count = (len(tokens) - 1) // args.seq
    step = 0
    while True:
        first = (step * world + rank) * args.batch
        rows = [(first + b) % count * args.seq for b in range(args.batch)]
        chunk = torch.from_numpy(np.stack([tokens[r:r + args.seq + 1] for r in rows]).astype(np.int64)).to(device)
        yield chunk[:, :-1], chunk[:, 1:]
        step += 1


def wrap(args, model, world):
    """Applies the strategy; returns (model, optimizer)."""
    adamw = dict(lr=args.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    if args.strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        mesh = init_device_mesh(args.device, (world,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) \
            if args.dtype == "bf16" else MixedPrecisionPolicy()
        for block in model.blocks:
            if args.compile:
                block.compile()
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        return model, torch.optim.AdamW(model.parameters(), **adamw)
    if args.compile:
        model.compile()
    if args.strategy == "none":
        return model, torch.optim.AdamW(model.parameters(), **adamw)
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if args.strategy == "ddp":
        return model, torch.optim.AdamW(model.parameters(), **adamw)
    return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW,
                                          parameters_as_bucket_view=True, **adamw)


def main():
    start = process_start()
    args = parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.set_num_threads(args.threads or max(1, os.cpu_count() // local_world))
    if ("RANK" in os.environ) != (args.strategy != "none"):
        sys.exit("--strategy none runs without torchrun; ddp, fsdp2 and zero1 run under it")
    device = torch.device("cpu")
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    if args.strategy != "none":
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    torch.manual_seed(args.seed)  # the same initial weights on every rank
    config = load_config(args.model)
    model = build(config).to(device)
    params = sum(p.numel() for p in model.parameters())
    model, optimizer = wrap(args, model, world)
    # FSDP2 casts by its own policy; the other strategies use autocast.
    autocast = args.dtype == "bf16" and args.strategy != "fsdp2"
    precision = torch.autocast(args.device, torch.bfloat16) if autocast else nullcontext()
    data = batches(args, config["vocab_size"], rank, world, device)
    seconds, to_first = [], None
    for step in range(args.warmup + args.steps):
        began = time.perf_counter()
        ids, targets = next(data)
        with precision:
            loss = model(ids, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        value = loss.item()
        seconds.append(time.perf_counter() - began)
        if to_first is None:
            to_first = time.clock_gettime(time.CLOCK_BOOTTIME) - start
    timed = seconds[args.warmup:]
    counted = torch.cuda.max_memory_allocated() if args.device == "cuda" else 0
    slowest = torch.tensor([to_first, peak_rss(), statistics.median(timed), counted], dtype=torch.float64, device=device)
    mean = torch.tensor([value], dtype=torch.float64, device=device)
    if world > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(mean)
    tokens = args.batch * args.seq * world
    to_first, peak, median, counted = slowest.tolist()
    if rank == 0:
        print(json.dumps({
            "peer": "pytorch", "version": torch.__version__, "model": args.model, "params": params,
            "device": args.device, "dtype": args.dtype, "strategy": args.strategy, "compile": args.compile, "world_size": world,
            "threads": torch.get_num_threads(), "batch_per_rank": args.batch, "seq": args.seq, "steps": len(timed),
            "tokens_per_second_median": tokens / median, "tokens_per_second_best": tokens / min(timed),
            "step_ms_median": median * 1e3, "seconds_to_first_step": to_first, "peak_rss_bytes": int(peak),
            "final_loss": mean.item() / world, "memory_counted_bytes": int(counted),
        }), flush=True)
    if dist.is_initialized():
        dist.barrier()
        sys.stdout.flush()
        os._exit(0)  # gloo threads that FSDP2 holds can abort a normal exit: see README.md


if __name__ == "__main__":
    main()
