"""Times gloo's collectives with torch.distributed; one JSON line for each operation and size.

    torchrun --nproc-per-node 2 peers/torch_collectives.py
    torchrun --nproc-per-node 2 peers/torch_collectives.py --ops all_reduce --max-bytes 1048576

The fields, sizes and bandwidths are those of `trireme bench collectives`.
"""
import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist

BUS_FACTOR = {"all_reduce": lambda n: 2 * (n - 1) / n, "all_gather": lambda n: (n - 1) / n,
              "reduce_scatter": lambda n: (n - 1) / n, "all_to_all": lambda n: (n - 1) / n,
              "broadcast": lambda n: 1.0}


def prepare(op, count, world, rank):
    """(call, verify, input) of one operation on `count` fp32 elements; verify holds after the first call."""
    full = torch.full((count,), rank + 1.0)
    part = torch.full((count // world,), rank + 1.0)
    out = torch.zeros(count)
    total = world * (world + 1) / 2
    each = torch.arange(1.0, world + 1).repeat_interleave(count // world)
    if op == "all_reduce":
        return lambda: dist.all_reduce(full), lambda: bool((full == total).all()), full
    if op == "all_gather":
        return lambda: dist.all_gather_single(out, part), lambda: bool((out == each).all()), part
    if op == "reduce_scatter":
        return lambda: dist.reduce_scatter_single(part, full), lambda: bool((part == total).all()), full
    if op == "all_to_all":
        return lambda: dist.all_to_all_single(out, full), lambda: bool((out == each).all()), full
    return lambda: dist.broadcast(full, src=0), lambda: bool((full == 1).all()), full


def measure(op, size, args, world, rank):
    count = size // 4 // world * world
    call, verify, data = prepare(op, count, world, rank)
    call()
    if not verify():
        raise RuntimeError(f"{op} of {size} bytes gave a wrong result")
    data.zero_()  # keeps repeated sums finite

    def once():
        dist.barrier()
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    trial = torch.tensor([once() for _ in range(args.warmup)]).median()
    dist.all_reduce(trial, dist.ReduceOp.MAX)  # every rank must run the same number of iterations
    iters = min(args.iters, max(5, int(args.seconds / trial.item())))
    times = torch.tensor([once() for _ in range(iters)], dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)  # an iteration lasts until its slowest rank is done
    median = times.sort().values[iters // 2].item()
    gbps = count * 4 / median / 1e9
    return {"peer": "pytorch", "op": op, "bytes": count * 4, "world_size": world, "iters": iters,
            "median_us": median * 1e6, "algbw_gbps": gbps, "busbw_gbps": gbps * BUS_FACTOR[op](world)}


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--ops", nargs="+", choices=list(BUS_FACTOR), default=list(BUS_FACTOR))
    p.add_argument("--min-bytes", type=int, default=4 << 10)
    p.add_argument("--max-bytes", type=int, default=256 << 20)
    p.add_argument("--factor", type=int, default=4, help="step from one size to the next")
    p.add_argument("--iters", type=int, default=200, help="most timed iterations for one size")
    p.add_argument("--seconds", type=float, default=1.0, help="time to aim for at one size")
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--threads", type=int, default=1)
    args = p.parse_args()
    torch.set_num_threads(args.threads)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for op in args.ops:
        size = args.min_bytes
        while size <= args.max_bytes:
            line = measure(op, size, args, world, rank)
            if rank == 0:
                print(json.dumps(line), flush=True)
            size *= args.factor
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # see torch_train.py


if __name__ == "__main__":
    main()
