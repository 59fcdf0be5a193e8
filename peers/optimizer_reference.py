"""Golden values of optimizers: the constants of crates/optim/tests/optim/golden.rs.

    python peers/optimizer_reference.py

For each optimizer the script prints a matrix of 6 x 4 and a vector of 5 after a few steps in f64. AdamW, Adam, SGD,
Adafactor and Muon are those of torch.optim (Muon's iteration runs in f64 instead of bf16). The others follow the
algorithms in the papers that docs/optimizers.md names.
"""
import functools

import numpy as np
import torch
from torch.optim import _muon

LR = 0.05
DECAYS = 0.1, 0.0  # of the matrix, of the vector
BETA1, BETA2, EPS = 0.9, 0.95, 1e-8
MOMENTUM = 0.9


def values(count, seed):
    """Multiples of 1/64 between -2 and 2, from a linear congruential generator."""
    state, result = seed, []
    for _ in range(count):
        state = (state * 1_103_515_245 + 12_345) % 2**31
        result.append(((state >> 16) % 257 - 128) / 64)
    return np.array(result)


def matrix_and_vector(seed):
    return values(24, seed + 1).reshape(6, 4), values(5, seed + 2)


def run_torch(make, num_steps, num_parameters=2):
    """Steps of the torch optimizer that `make(parameters, weight_decay)` returns."""
    results = []
    for i in range(num_parameters):
        parameter = torch.tensor(matrix_and_vector(0)[i], requires_grad=True)
        optimizer = make([parameter], DECAYS[i])
        for step in range(1, num_steps + 1):
            parameter.grad = torch.tensor(matrix_and_vector(100 * step)[i])
            optimizer.step()
        results.append(parameter.detach().numpy())
    return results


def run_numpy(rule, num_steps):
    """Steps of `rule(parameter, grad, weight_decay, state, step)`, which returns the new parameter."""
    results = []
    for i, parameter in enumerate(matrix_and_vector(0)):
        state = {}
        for step in range(1, num_steps + 1):
            parameter = rule(parameter, matrix_and_vector(100 * step)[i], DECAYS[i], state, step)
        results.append(parameter)
    return results


def moments(grad, state, step, num_variance_updates=None):
    """Adam's moments, corrected for their bias; the second one changes only in the steps that it counts."""
    updates = step if num_variance_updates is None else num_variance_updates(step)
    state["mean"] = BETA1 * state.get("mean", 0.0) + (1 - BETA1) * grad
    if updates != state.get("updates", 0):
        state["square"] = BETA2 * state.get("square", 0.0) + (1 - BETA2) * grad**2
        state["updates"] = updates
    return state["mean"] / (1 - BETA1**step), state["square"] / (1 - BETA2**updates)


def lion(p, grad, decay, state, step):
    mean = state.get("mean", np.zeros_like(p))
    update = np.sign(BETA1 * mean + (1 - BETA1) * grad)
    state["mean"] = BETA2 * mean + (1 - BETA2) * grad
    return p - LR * (update + decay * p)


def ratio(length, other):
    return length / other if length > 0 and other > 0 else 1.0


def lamb(p, grad, decay, state, step):
    mean, square = moments(grad, state, step)
    update = mean / (np.sqrt(square) + EPS) + decay * p
    return p - LR * ratio(np.linalg.norm(p), np.linalg.norm(update)) * update


def lars(p, grad, decay, state, step, trust_coefficient=0.02):
    length = np.linalg.norm(p)
    local = trust_coefficient * ratio(length, np.linalg.norm(grad) + decay * length)
    state["velocity"] = MOMENTUM * state.get("velocity", 0.0) + LR * local * (grad + decay * p)
    return p - state["velocity"]


def compressed_adam(p, grad, decay, state, step, num_variance_updates):
    """1-bit Adam and 0/1 Adam on one worker, where nothing is compressed."""
    mean, square = moments(grad, state, step, num_variance_updates)
    return p - LR * (mean / (np.sqrt(square) + EPS) + decay * p)


def newton_schulz_in_f64(grad, coefficients, steps, eps):
    a, b, c = coefficients
    x = grad.T if grad.shape[0] > grad.shape[1] else grad
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.shape[0] > grad.shape[1] else x


def muon(scale):
    def make(parameters, decay):
        return torch.optim.Muon(parameters, lr=LR, weight_decay=decay, momentum=0.95, nesterov=True, ns_steps=5,
                                adjust_lr_fn=scale)
    return run_torch(make, 3, num_parameters=1)  # vectors are left to AdamW


def main():
    _muon._zeropower_via_newtonschulz = newton_schulz_in_f64
    adam = {"lr": LR, "betas": (BETA1, BETA2), "eps": EPS}
    optim = torch.optim
    warmup = functools.partial(compressed_adam, num_variance_updates=lambda step: min(step, 2))
    # With one update before each doubling, steps 1, 2, 4, 8, ... update the second moment.
    doubling = functools.partial(compressed_adam, num_variance_updates=lambda step: step.bit_length())
    results = {
        "AdamW": run_torch(lambda p, decay: optim.AdamW(p, weight_decay=decay, **adam), 3),
        "Adam": run_torch(lambda p, decay: optim.Adam(p, weight_decay=decay, **adam), 3),
        "Sgd": run_torch(lambda p, decay: optim.SGD(p, LR, MOMENTUM, weight_decay=decay, nesterov=True), 3),
        "Lion": run_numpy(lion, 3),
        "Adafactor": run_torch(lambda p, decay: optim.Adafactor(p, LR, beta2_decay=-0.8, weight_decay=decay), 3),
        "Lamb": run_numpy(lamb, 3),
        "Lars": run_numpy(lars, 3),
        "Muon, original": muon("original"),
        "Muon, match_rms_adamw": muon("match_rms_adamw"),
        "CompressedAdam, warm-up of 2 steps": run_numpy(warmup, 3),
        "CompressedAdam, doubling after 1 update": run_numpy(doubling, 5),
    }
    for name, parameters in results.items():
        print(name)
        for parameter in parameters:
            numbers = [f"{number:.7f}" for number in parameter.flat]
            for first in range(0, len(numbers), 8):
                print("   ", ", ".join(numbers[first:first + 8]))


if __name__ == "__main__":
    main()
