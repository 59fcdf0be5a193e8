"""Golden values of fine-tuning on conversations, of multiple-choice questions and of the loss of a text.

    python peers/fine_tuning_reference.py crates/cli/tests/golden

The folder has chat.jsonl, multiple_choice.jsonl and eval_text.txt; and in chat_model a tokenizer of bytes, as
`trireme checkpoint export` writes it, and chat_template.jinja. The script writes a GPT-2 with random weights into chat_model
(config.json and model.safetensors), and what it found beside the data:

- chat_losses.json: the losses of AdamW steps on the answers, before each step, by transformers and torch;
- multiple_choice.json: log-likelihoods and accuracies by lm-evaluation-harness;
- eval_text.json: the loss of the text in windows of 128 tokens, and in windows of 64.

Everything is f32. Besides peers/requirements.txt, this takes `pip install lm_eval==0.4.13 accelerate==1.15.0`.
"""
import argparse
import json
import math
import os
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

END = 256  # the token that ends documents
SEQ_LEN = 128
NUM_STEPS = 10
LR, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


def write_model(folder):
    """A small GPT-2 in which every parameter matters: weights far larger than usual, no biases of zero."""
    config = GPT2Config(vocab_size=257, n_positions=SEQ_LEN, n_embd=32, n_layer=2, n_head=2, bos_token_id=END,
                        eos_token_id=END, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()


def read_json_lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def document_of(tokenizer, messages):
    """The tokens of a conversation, and 1 for each that is to be learned."""
    found = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    tokens, learned = list(found["input_ids"]), list(found["assistant_masks"])
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert tokens == tokenizer(text)["input_ids"]
    # What is learned is the answers as the template writes them, and nothing else.
    answers = [m["content"].strip() + tokenizer.eos_token for m in messages if m["role"] == "assistant"]
    assert tokenizer.decode([t for t, l in zip(tokens, learned) if l]) == "".join(answers)
    if tokens[-1] != END:
        tokens.append(END)
        learned.append(0)  # no answer ends here
    return tokens, learned


def pack(documents):
    """Windows of whole documents in their order; a document that does not fit into a window begins the next one."""
    windows = [[]]
    for document in documents:
        if sum(len(tokens) for tokens, _ in windows[-1]) + len(document[0]) > SEQ_LEN + 1:
            windows.append([])
        windows[-1].append(document)
    return windows


def batch_of(windows):
    """Inputs, targets, weights of targets, and what attention adds to scores, for all windows."""
    shape = len(windows), SEQ_LEN + 1
    tokens, learned = torch.zeros(shape, dtype=torch.long), torch.zeros(shape)
    owners = torch.full(shape, -1)  # the document of each token; padding is one of its own
    for row, window in enumerate(windows):
        start = 0
        for index, (document, learns) in enumerate(window):
            end = start + len(document)
            tokens[row, start:end] = torch.tensor(document)
            learned[row, start:end] = torch.tensor(learns, dtype=torch.float)
            learned[row, start] = 0  # nothing before the first token tells of it
            owners[row, start:end] = index
            start = end
    inputs = owners[:, :-1]
    is_seen = (inputs[:, :, None] == inputs[:, None, :]) & torch.ones(SEQ_LEN, SEQ_LEN, dtype=torch.bool).tril()
    mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, -math.inf)[:, None]
    return tokens[:, :-1], tokens[:, 1:], learned[:, 1:], mask


def train(folder, windows):
    """The loss before each step; every step takes all windows."""
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").train()
    inputs, targets, weights, mask = batch_of(windows)
    positions = torch.arange(SEQ_LEN).expand_as(inputs)
    parameters = list(model.parameters())  # the head is the embedding, and comes once
    groups = [{"params": [p for p in parameters if p.dim() == 2], "weight_decay": WEIGHT_DECAY},
              {"params": [p for p in parameters if p.dim() != 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    losses, norms = [], []
    for _ in range(NUM_STEPS):
        logits = model(input_ids=inputs, attention_mask=mask, position_ids=positions, use_cache=False).logits
        of_tokens = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        loss = (of_tokens * weights.flatten()).sum() / weights.sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM).item())
        optimizer.step()
        losses.append(loss.item())
    return {"torch": torch.__version__, "transformers": transformers.__version__, "seq_len": SEQ_LEN,
            "num_windows": len(windows), "num_tokens": sum(len(t) for window in windows for t, _ in window),
            "num_learned": int(weights.sum()), "losses": losses, "grad_norms": norms}


def multiple_choice(folder, path, cache):
    """What the harness says of the model in a task that is made of a file."""
    task = {"task": "multiple_choice", "dataset_path": "json", "test_split": "test",
            "dataset_kwargs": {"data_files": {"test": str(path)}, "cache_dir": cache},
            "output_type": "multiple_choice", "doc_to_text": "context", "doc_to_choice": "choices",
            "doc_to_target": "answer", "target_delimiter": " ", "num_fewshot": 0,
            "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True}
                            for name in ("acc", "acc_norm")]}
    model = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=1)
    found = lm_eval.simple_evaluate(model=model, tasks=[task], log_samples=True,
                                    task_manager=TaskManager(include_defaults=False))
    results = found["results"]["multiple_choice"]
    samples = sorted(found["samples"]["multiple_choice"], key=lambda sample: sample["doc_id"])
    likelihoods = [[float(likelihood) for likelihood, _ in sample["filtered_resps"]] for sample in samples]
    names = ("acc", "acc_stderr", "acc_norm", "acc_norm_stderr")
    return {"lm_eval": lm_eval.__version__, "loglikelihoods": likelihoods,
            **{name: float(results[f"{name},none"]) for name in names}}


def loss_of_text(folder, path, seq_len):
    """The mean loss in windows that follow each other; the last one is left out if it is not whole."""
    model = GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = torch.tensor([*path.read_bytes(), END])
    num_windows = (len(tokens) - 1) // seq_len
    inputs = tokens[:num_windows * seq_len].view(num_windows, seq_len)
    targets = tokens[1:num_windows * seq_len + 1]
    with torch.no_grad():
        logits = model(input_ids=inputs, use_cache=False).logits
    loss = cross_entropy(logits.flatten(0, 1), targets).item()
    num_tokens, num_bytes = len(targets), int((targets < END).sum())
    return {"loss": loss, "num_tokens": num_tokens, "perplexity": math.exp(loss),
            "bits_per_byte": loss / math.log(2) * num_tokens / num_bytes}


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", type=Path)
    folder = p.parse_args().folder
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = folder / "chat_model"
    write_model(model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    chats = read_json_lines(folder / "chat.jsonl")
    windows = pack([document_of(tokenizer, chat["messages"]) for chat in chats])
    write_json(folder / "chat_losses.json", train(model, windows))
    with tempfile.TemporaryDirectory() as cache:
        found = multiple_choice(model, folder / "multiple_choice.jsonl", cache)
    write_json(folder / "multiple_choice.json", found)
    text = folder / "eval_text.txt"
    losses = loss_of_text(model, text, SEQ_LEN) | {"seq_len_64": loss_of_text(model, text, 64)}
    write_json(folder / "eval_text.json", losses)


if __name__ == "__main__":
    main()
