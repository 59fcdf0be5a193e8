"""Checks with transformers itself that models travel between it and Trireme.

    python peers/foreign_models.py target/release/trireme

For each of several families a small model with random weights is saved by transformers, with a tokenizer and files that only
other programs read. Then:

- round trip: Trireme trains it for no step and exports it; the directory must hold the same files with the same contents, and the
  same weights (in f32);
- logits: Trireme's log-likelihoods of texts must be those of transformers;
- text: both must continue prompts with the same tokens, the likeliest ones;
- export: after some steps of training in Trireme, transformers loads the export with its Auto classes, and both must again continue
  prompts in the same way.

Prints one JSON line a family, and exits with 1 if one differs.
"""
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from transformers import (AutoModelForCausalLM, AutoTokenizer, Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig,
                          PreTrainedTokenizerFast, Qwen2Config, Qwen3Config)
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

TEXTS = ["the quick brown fox jumps over the lazy dog. ", "workers add up gradients in one order. ", "größe, naïve café! "]
PROMPTS = ["the quick", "workers add up", "naïve"]
POSITIONS = 96

SHAPE = dict(hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=POSITIONS)


def families(vocab_size, end):
    ids = dict(vocab_size=vocab_size, bos_token_id=end, eos_token_id=end, pad_token_id=end)
    return {
        "gpt2": GPT2Config(n_embd=48, n_layer=2, n_head=4, n_positions=POSITIONS, **ids),
        "llama": LlamaConfig(**SHAPE, **ids),
        "qwen2": Qwen2Config(**SHAPE, tie_word_embeddings=True, **ids),
        "qwen3": Qwen3Config(**SHAPE, head_dim=12, **ids),
        "gemma2": Gemma2Config(**SHAPE, head_dim=12, query_pre_attn_scalar=12, sliding_window=32, **ids),
        "mixtral": MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=None, **ids),
    }


def tokenizer():
    """A byte-level BPE with a chat template."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet,
                                  show_progress=False)
    bpe.train_from_iterator(TEXTS * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|endoftext|>", eos_token="<|endoftext|>",
                                   pad_token="<|endoftext|>", model_max_length=POSITIONS)
    fast.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    return fast


def trireme(program, *arguments):
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"trireme {' '.join(map(str, arguments))}\n{done.stdout}{done.stderr}")
    return done.stdout


def train(program, model, run, steps, folder):
    """Trains `model` in Trireme, and exports it; the folder of the export."""
    settings = {"data.inputs": [str(folder / "text.txt")], "training.steps": steps, "training.seq_len": 32,
                "training.local_batch_size": 4, "training.threads": 1, "generate.num_tokens": 0,
                "optimizer.lr": 3e-3, "run.name": run, "run.folder": str(folder / "runs")}
    config = folder / f"{run}.toml"
    config.write_text(f"[model]\ninit_from = {json.dumps(str(model))}\n")
    sets = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    trireme(program, "train", config, *sets)
    trireme(program, "checkpoint", "export", folder / "runs" / run, folder / run)
    return folder / run


def differing_files(before, after):
    """Names of files that are not the same in both folders, the dtype of the weights apart."""
    names = {path.name for folder in (before, after) for path in folder.iterdir()}
    found = []
    for name in sorted(names):
        left, right = before / name, after / name
        if not (left.exists() and right.exists()):
            found.append(name)
        elif name == "model.safetensors":
            ours, theirs = load_file(right), load_file(left)
            same = ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key].float()) for key in ours)
            found += [] if same else [name]
        elif name.endswith(".json"):
            found += [] if json.loads(left.read_text()) == json.loads(right.read_text()) else [name]
        else:
            found += [] if left.read_bytes() == right.read_bytes() else [name]
    return found


def continuations(model, tokenizer, num_tokens=24):
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([tokenizer(prompt, add_special_tokens=False).input_ids])
        made = model.generate(ids, max_new_tokens=num_tokens, do_sample=False, attention_mask=torch.ones_like(ids))
        texts.append(tokenizer.decode(made[0, ids.shape[1]:], skip_special_tokens=True))
    return texts


def ours_continued(program, model, folder, num_tokens=24):
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    printed = trireme(program, "generate", model, "--prompt-file", prompts, "--json", "--temperature", 0,
                      "--num-tokens", num_tokens)
    return [json.loads(line)["text"] for line in printed.splitlines()]


def log_likelihoods(model, tokenizer):
    """Of each text after each prompt."""
    found = []
    for prompt in PROMPTS:
        context = tokenizer(prompt, add_special_tokens=False).input_ids
        for text in TEXTS:
            ids = tokenizer(f"{prompt} {text}", add_special_tokens=False).input_ids
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0].log_softmax(-1)
            found.append(sum(logits[place - 1, ids[place]].item() for place in range(len(context), len(ids))))
    return found


def ours_likelihoods(program, model, folder):
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps({"context": prompt, "choices": TEXTS, "answer": 0}) + "\n" for prompt in PROMPTS))
    printed = trireme(program, "eval", model, questions, "--json")
    return [value for values in json.loads(printed)["log_likelihoods"] for value in values]


def check(program, name, config, tokenizer, folder):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():  # fresh models have zero biases and unit norms: make every parameter matter
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    saved = folder / "saved"
    model.save_pretrained(saved)
    tokenizer.save_pretrained(saved)
    (folder / "text.txt").write_text("".join(TEXTS) * 40)
    differing = differing_files(saved, train(program, saved, "untrained", 0, folder))
    expected = log_likelihoods(model, tokenizer)
    likelihood_diff = max(abs(a - b) for a, b in zip(ours_likelihoods(program, saved, folder), expected, strict=True))
    same_text = ours_continued(program, saved, folder) == continuations(model, tokenizer)
    trained = train(program, saved, "trained", 20, folder)
    loaded = AutoModelForCausalLM.from_pretrained(trained, attn_implementation="eager").float().eval()
    their_tokenizer = AutoTokenizer.from_pretrained(trained)
    same_after = ours_continued(program, trained, folder) == continuations(loaded, their_tokenizer)
    moved = any(not torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))
    is_equal = not differing and likelihood_diff < 1e-3 and same_text and same_after and moved
    print(json.dumps({"family": name, "differing_files": differing, "log_likelihood_max_abs_diff": likelihood_diff,
                      "same_text": same_text, "same_text_after_training": same_after, "ok": is_equal}), flush=True)
    return is_equal


def check_bytes(program, folder):
    """A model of bytes, trained in Trireme, has a tokenizer that transformers loads."""
    (folder / "text.txt").write_text("".join(TEXTS) * 40)
    config = folder / "bytes.toml"
    config.write_text('[model]\narchitecture = "gpt2"\nhidden_size = 32\nnum_layers = 1\nnum_heads = 2\n[training]\nseq_len = 32\n')
    sets = {"data.inputs": [str(folder / "text.txt")], "training.steps": 20, "optimizer.lr": 3e-3, "generate.num_tokens": 0,
            "run.folder": str(folder / "runs")}
    trireme(program, "train", config, *[word for key, value in sets.items() for word in ("--set", f"{key}={json.dumps(value)}")])
    exported = folder / "exported"
    trireme(program, "checkpoint", "export", folder / "runs/bytes", exported)
    theirs = AutoTokenizer.from_pretrained(exported)
    same_ids = all(theirs(text, add_special_tokens=False).input_ids == list(text.encode()) for text in TEXTS)
    loaded = AutoModelForCausalLM.from_pretrained(exported).float().eval()
    same_text = ours_continued(program, exported, folder, 8) == continuations(loaded, theirs, 8)
    is_equal = same_ids and same_text and theirs.eos_token_id == 256
    print(json.dumps({"family": "gpt2 of bytes", "same_ids": same_ids, "same_text": same_text, "ok": is_equal}), flush=True)
    return is_equal


def main():
    program = str(Path(sys.argv[1]).resolve())
    fast = tokenizer()
    results = []
    for name, config in families(len(fast), fast.eos_token_id).items():
        with tempfile.TemporaryDirectory() as folder:
            results.append(check(program, name, config, fast, Path(folder)))
    with tempfile.TemporaryDirectory() as folder:
        results.append(check_bytes(program, Path(folder)))
    return all(results)


if __name__ == "__main__":
    sys.exit(not main())
