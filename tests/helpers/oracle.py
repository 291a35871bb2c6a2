"""The slow oracle: the semantics of the contract in float64, by brute force, sharing no code with the engine.

It knows a Llama-shaped model only by its weights and configuration, works one message at a time and one query
token at a time, and keeps keys *unrotated*: every view rotates them afresh to where that view wants them.
"""

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class OracleMessage:
    """tokens from logical position `start` on; parents as (message, offset)."""

    tokens: list[int]
    position: int
    parents: list[tuple["OracleMessage", int]]
    keys: list[np.ndarray] | None = None  # per layer (T, G, D), unrotated
    values: list[np.ndarray] | None = None
    hidden: list[np.ndarray] | None = None  # what comes into each layer (T, E)
    logprobs: np.ndarray | None = None  # (T, V) of the token after each


class Oracle:
    """Computes messages with the weights of a transformers Llama model."""

    def __init__(self, model) -> None:
        self.c = model.config
        self.w = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
        self.head_dim = getattr(self.c, "head_dim", None) or self.c.hidden_size // self.c.num_attention_heads
        self.inv_freq = self._inv_freq(self.c.rope_parameters)

    def _inv_freq(self, rope: dict) -> np.ndarray:
        base, dim = rope["rope_theta"], self.head_dim
        plain = np.array([base ** (-2 * i / dim) for i in range(dim // 2)])
        if rope["rope_type"] == "default":
            return plain
        assert rope["rope_type"] == "llama3"
        scaled = []
        for f in plain:
            wavelength = 2 * math.pi / f
            low = rope["original_max_position_embeddings"] / rope["low_freq_factor"]
            high = rope["original_max_position_embeddings"] / rope["high_freq_factor"]
            if wavelength < high:
                scaled.append(f)
            elif wavelength > low:
                scaled.append(f / rope["factor"])
            else:
                smooth = rope["original_max_position_embeddings"] / wavelength - rope["low_freq_factor"]
                smooth /= rope["high_freq_factor"] - rope["low_freq_factor"]
                scaled.append((1 - smooth) * f / rope["factor"] + smooth * f)
        return np.array(scaled)

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """One vector per head (heads, D) at one position."""
        half = self.head_dim // 2
        cos, sin = np.cos(position * self.inv_freq), np.sin(position * self.inv_freq)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.rms_norm_eps) * self.w[name]

    def compute(self, message: OracleMessage) -> OracleMessage:
        """Fills keys, values and log-probabilities of a message whose parents are computed."""
        x = self.w["model.embed_tokens.weight"][message.tokens]
        message.keys, message.values, message.hidden = [], [], []
        for layer in range(self.c.num_hidden_layers):
            x = self.forward_layer(message, layer, x)
        message.logprobs = self.log_softmax(x)
        return message

    def log_softmax(self, x: np.ndarray) -> np.ndarray:
        """Log-probabilities (T, V) of what comes out of the last layer."""
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        logits = self.norm(x, "model.norm.weight") @ head.T
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))

    def forward_layer(self, message: OracleMessage, layer: int, x: np.ndarray) -> np.ndarray:
        """One layer; notes what came in, keys and values."""
        message.hidden.append(x)
        name = f"model.layers.{layer}."
        x = x + self.attention(message, layer, self.norm(x, name + "input_layernorm.weight"), name + "self_attn.")
        return x + self.feed_forward(x, name)

    def feed_forward(self, x: np.ndarray, name: str) -> np.ndarray:
        y = self.norm(x, name + "post_attention_layernorm.weight")
        gate = y @ self.w[name + "mlp.gate_proj.weight"].T
        gate = gate / (1 + np.exp(-gate)) * (y @ self.w[name + "mlp.up_proj.weight"].T)
        return gate @ self.w[name + "mlp.down_proj.weight"].T

    def compute_layers(self, message: OracleMessage, source: OracleMessage, layers: set[int]) -> OracleMessage:
        """A message that another model computed before (`sent`): these layers are computed, the others taken over.
        Where computing begins in the middle, it begins from what came into that layer there."""
        message.keys, message.values, message.hidden = [], [], []
        x = self.w["model.embed_tokens.weight"][message.tokens]
        for layer in range(self.c.num_hidden_layers):
            if layer in layers:
                x = self.forward_layer(message, layer, x)
            else:
                for mine, theirs in ((message.keys, source.keys), (message.values, source.values)):
                    mine.append(theirs[layer])
                message.hidden.append(source.hidden[layer])
                x = source.hidden[layer + 1] if layer + 1 < self.c.num_hidden_layers else None
        return message

    def attention(self, m: OracleMessage, layer: int, x: np.ndarray, name: str) -> np.ndarray:
        count, heads, groups = len(m.tokens), self.c.num_attention_heads, self.c.num_key_value_heads
        q = (x @ self.w[name + "q_proj.weight"].T).reshape(count, heads, -1)
        m.keys.append((x @ self.w[name + "k_proj.weight"].T).reshape(count, groups, -1))
        m.values.append((x @ self.w[name + "v_proj.weight"].T).reshape(count, groups, -1))
        seen_keys, seen_values = [], []
        for parent, offset in m.parents:  # every token of every parent
            for j in range(len(parent.tokens)):
                seen_keys.append(self.rotate(parent.keys[layer][j], offset + j))
                seen_values.append(parent.values[layer][j])
        for j in range(count):
            seen_keys.append(self.rotate(m.keys[layer][j], m.position + j))
            seen_values.append(m.values[layer][j])
        keys, values = np.array(seen_keys), np.array(seen_values)
        out = np.zeros((count, heads, self.head_dim))
        for k in range(count):
            visible = len(seen_keys) - count + k + 1  # and itself up to here
            query = self.rotate(q[k], m.position + k)
            for h in range(heads):
                g = h // (heads // groups)
                scores = keys[:visible, g] @ query[h] / math.sqrt(self.head_dim)
                weights = np.exp(scores - scores.max())
                out[k, h] = (weights / weights.sum()) @ values[:visible, g]
        return out.reshape(count, -1) @ self.w[name + "o_proj.weight"].T

    def score_context(self, parts: list[tuple[OracleMessage, int, int, int]]) -> np.ndarray:
        """Log-probabilities (C, V) after every token of a context, which is not changed.

        A part is (message, first token, end token, position of the first one). Each token is computed again as a
        query at its place, over the keys and values of the context up to itself.
        """
        places = [(m, j, position + j - first) for m, first, end, position in parts for j in range(first, end)]
        heads, share = self.c.num_attention_heads, self.c.num_attention_heads // self.c.num_key_value_heads
        x = self.w["model.embed_tokens.weight"][[m.tokens[j] for m, j, _ in places]]
        for layer in range(self.c.num_hidden_layers):
            name = f"model.layers.{layer}."
            queries = self.norm(x, name + "input_layernorm.weight") @ self.w[name + "self_attn.q_proj.weight"].T
            keys = np.array([self.rotate(m.keys[layer][j], position) for m, j, position in places])
            values = np.array([m.values[layer][j] for m, j, _ in places])
            out = np.zeros((len(places), heads, self.head_dim))
            for k, (_, _, position) in enumerate(places):
                query = self.rotate(queries[k].reshape(heads, -1), position)
                for h in range(heads):
                    scores = keys[: k + 1, h // share] @ query[h] / math.sqrt(self.head_dim)
                    weights = np.exp(scores - scores.max())
                    out[k, h] = (weights / weights.sum()) @ values[: k + 1, h // share]
            x = x + out.reshape(len(places), -1) @ self.w[name + "self_attn.o_proj.weight"].T
            x = x + self.feed_forward(x, name)
        return self.log_softmax(x)
