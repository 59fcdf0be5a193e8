"""Bare GPT-2 and Llama in plain PyTorch, for timing.

The same mathematics as the Hugging Face models (check_models.py proves it) without their overhead. Projections that share
an input are one product (Llama: q, k and v; gate and up), attention is F.scaled_dot_product_attention, and
`forward(ids, targets)` returns the mean cross-entropy.
"""
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

INITIALIZER_RANGE = 0.02


def load_config(folder):
    """The config.json of a folder, such as configs/models/gpt2-11m."""
    return json.loads((Path(folder) / "config.json").read_text())


def build(config):
    return {"gpt2": GPT2, "llama": Llama}[config["model_type"]](config)


def head_and_loss(model, x, targets):
    logits = model.lm_head(model.norm(x))
    if targets is None:
        return logits
    return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), targets.reshape(-1))


class GPT2Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c["n_embd"]
        inner = c.get("n_inner") or 4 * d
        self.heads = c["n_head"]
        self.ln_1 = nn.LayerNorm(d, eps=c["layer_norm_epsilon"])
        self.c_attn = nn.Linear(d, 3 * d)
        self.attn_proj = nn.Linear(d, d)
        self.ln_2 = nn.LayerNorm(d, eps=c["layer_norm_epsilon"])
        self.c_fc = nn.Linear(d, inner)
        self.mlp_proj = nn.Linear(inner, d)

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.c_attn(self.ln_1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c["n_embd"]
        self.wte = nn.Embedding(c["vocab_size"], d)
        self.wpe = nn.Embedding(c["n_positions"], d)
        self.blocks = nn.ModuleList(GPT2Block(c) for _ in range(c["n_layer"]))
        self.norm = nn.LayerNorm(d, eps=c["layer_norm_epsilon"])
        self.lm_head = nn.Linear(d, c["vocab_size"], bias=False)
        self.lm_head.weight = self.wte.weight
        std = c.get("initializer_range", INITIALIZER_RANGE)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=std / math.sqrt(2 * c["n_layer"]) if "_proj" in name else std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, ids, targets=None):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return head_and_loss(self, x, targets)

    def load_hf(self, state):
        """Takes over tensors with Hugging Face names, of which Conv1D's are stored [in, out]."""
        own = {"wte.weight": state["transformer.wte.weight"], "wpe.weight": state["transformer.wpe.weight"],
               "norm.weight": state["transformer.ln_f.weight"], "norm.bias": state["transformer.ln_f.bias"],
               "lm_head.weight": state["transformer.wte.weight"]}
        names = {"ln_1": "ln_1", "ln_2": "ln_2", "c_attn": "attn.c_attn", "attn_proj": "attn.c_proj",
                 "c_fc": "mlp.c_fc", "mlp_proj": "mlp.c_proj"}
        for i in range(len(self.blocks)):
            for mine, theirs in names.items():
                w = state[f"transformer.h.{i}.{theirs}.weight"]
                own[f"blocks.{i}.{mine}.weight"] = w.t() if w.dim() == 2 else w
                own[f"blocks.{i}.{mine}.bias"] = state[f"transformer.h.{i}.{theirs}.bias"]
        self.load_state_dict(own)


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


class LlamaBlock(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.heads, self.kv_heads = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        self.head_dim = c.get("head_dim") or d // self.heads
        inner = c["intermediate_size"]
        self.norm_1 = nn.RMSNorm(d, eps=c["rms_norm_eps"])
        self.qkv = nn.Linear(d, (self.heads + 2 * self.kv_heads) * self.head_dim, bias=False)
        self.o = nn.Linear(self.heads * self.head_dim, d, bias=False)
        self.norm_2 = nn.RMSNorm(d, eps=c["rms_norm_eps"])
        self.gate_up = nn.Linear(d, 2 * inner, bias=False)
        self.down = nn.Linear(inner, d, bias=False)

    def forward(self, x, cos, sin):
        b, t, _ = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, t, -1, self.head_dim).transpose(1, 2)
        qk, v = qkv.split([self.heads + self.kv_heads, self.kv_heads], dim=1)
        q, k = rotate(qk, cos.to(qk.dtype), sin.to(qk.dtype)).split([self.heads, self.kv_heads], dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, -1))
        gate, up = self.gate_up(self.norm_2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, c):
        super().__init__()
        d = c["hidden_size"]
        self.embed = nn.Embedding(c["vocab_size"], d)
        self.blocks = nn.ModuleList(LlamaBlock(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(d, eps=c["rms_norm_eps"])
        self.lm_head = nn.Linear(d, c["vocab_size"], bias=False)
        if c["tie_word_embeddings"]:
            self.lm_head.weight = self.embed.weight
        head_dim = c.get("head_dim") or d // c["num_attention_heads"]
        freq = c["rope_theta"] ** -(torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(c["max_position_embeddings"], dtype=torch.float32), freq).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=c.get("initializer_range", INITIALIZER_RANGE))

    def forward(self, ids, targets=None):
        t = ids.shape[1]
        x, cos, sin = self.embed(ids), self.cos[:t], self.sin[:t]
        for block in self.blocks:
            x = block(x, cos, sin)
        return head_and_loss(self, x, targets)

    def load_hf(self, state):
        """Takes over tensors with Hugging Face names."""
        own = {"embed.weight": state["model.embed_tokens.weight"], "norm.weight": state["model.norm.weight"],
               "lm_head.weight": state["lm_head.weight"]}
        names = {"norm_1": ["input_layernorm"], "norm_2": ["post_attention_layernorm"],
                 "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], "o": ["self_attn.o_proj"],
                 "gate_up": ["mlp.gate_proj", "mlp.up_proj"], "down": ["mlp.down_proj"]}
        for i in range(len(self.blocks)):
            for mine, theirs in names.items():
                own[f"blocks.{i}.{mine}.weight"] = torch.cat([state[f"model.layers.{i}.{n}.weight"] for n in theirs])
        self.load_state_dict(own)
