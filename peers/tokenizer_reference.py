"""Writes small tokenizers in the form of six families, and the ids that transformers gives with them, for
crates/data/tests/data/tokenizers.rs.

    pip install transformers==5.23.0 tokenizers==0.23.3 jinja2
    python peers/tokenizer_reference.py crates/data/tests/tokenizers

Each tokenizer is trained on a few words. Only the parts that decide about special tokens follow the published files: the
normalizer, the post-processor, the added tokens and tokenizer_config.json.
"""

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

WORDS = ["what is one and two", "one and two are three", "a ring of units is one unit"]
TEXT = "what is one and two"


def byte_level(special_tokens):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return train(tokenizer, special_tokens, alphabet)


def sentence_piece(special_tokens, normalizer):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    return train(tokenizer, special_tokens + bytes_, [])


def train(tokenizer, special_tokens, alphabet):
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special_tokens, initial_alphabet=alphabet)
    tokenizer.train_from_iterator(WORDS, trainer)
    # Tokens of bytes are ordinary tokens.
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(content))


def begins_with(tokenizer, token):
    id_ = tokenizer.token_to_id(token)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, id_)]
    )
    return tokenizer


def families():
    space = normalizers.Replace(" ", "▁")
    prefixed = normalizers.Sequence([normalizers.Prepend("▁"), space])
    turn = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    llama = begins_with(sentence_piece(["<unk>", "<s>", "</s>"], prefixed), "<s>")
    yield "llama", llama, {
        # The class LlamaTokenizer of transformers 5 has a normalizer of its own in place of the file's.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "add_eos_token": False,
        "chat_template": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
        "{% else %}{{ ' ' + message['content'] + ' ' + eos_token }}{% endif %}{% endfor %}",
    }
    gemma_tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    yield "gemma", begins_with(sentence_piece(gemma_tokens, space), "<bos>"), {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
        "add_bos_token": True, "add_eos_token": False,
        "chat_template": "{{ bos_token }}{% for message in messages %}{{ '<start_of_turn>' + (message['role'] if message['role'] == 'user' else 'model')"
        " + '\\n' + message['content'] + '<end_of_turn>\\n' }}{% endfor %}",
    }
    yield "qwen2", byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"]), {
        "tokenizer_class": "Qwen2Tokenizer",
        "bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None,
        "add_bos_token": False,
        "chat_template": turn,
    }
    begin, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    deepseek = begins_with(byte_level([begin, end, "<｜User｜>", "<｜Assistant｜>"]), begin)
    yield "deepseek", deepseek, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": begin, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False},
        "eos_token": {"__type": "AddedToken", "content": end, "lstrip": False, "normalized": True, "rstrip": False, "single_word": False},
        "add_bos_token": True, "add_eos_token": False,
        "chat_template": "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}"
        "{% else %}{{ '<｜Assistant｜>' + message['content'] + eos_token }}{% endif %}{% endfor %}",
    }
    yield "gpt2", byte_level(["<|endoftext|>"]), {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>",
    }
    yield "gpt_oss", byte_level(["<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|message|>", "<|end|>"]), {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|startoftext|>", "eos_token": "<|return|>", "pad_token": "<|endoftext|>",
        "chat_template": "{% for message in messages %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] }}"
        "{{ '<|return|>' if message['role'] == 'assistant' else '<|end|>' }}{% endfor %}",
    }


def main(folder):
    messages = [{"role": "user", "content": "one and two"}, {"role": "assistant", "content": "three"}]
    golden = {}
    for name, tokenizer, config in families():
        path = Path(folder) / name
        path.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path / "tokenizer.json"), pretty=False)
        (path / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1) + "\n")
        loaded = AutoTokenizer.from_pretrained(path)
        golden[name] = {
            "text": loaded(TEXT)["input_ids"],
            "empty": loaded("")["input_ids"],
            "end": loaded.eos_token_id,
            "chat": loaded.apply_chat_template(messages, return_dict=False) if loaded.chat_template else None,
        }
    (Path(folder) / "golden.json").write_text(json.dumps({"sentence": TEXT, "messages": messages, "families": golden}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
