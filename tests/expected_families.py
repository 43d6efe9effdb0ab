"""What is exact in each model of `families.py`, read by hand from its source code; what is not stated is not exact."""

from __future__ import annotations

from collections.abc import Sequence

from expected_layouts import (
    EXPERT_NEURONS,
    KV_RANK,
    Q_RANK,
    SHARED_NEURONS,
    VALUE_SIZE,
    Sizes,
    final,
    fused,
    gain,
    gated,
    linear,
    projections,
    separate,
)
from expected_rules import Gain, Generator, Linear, norm_gain, query_key, query_key_gain, starts, up_down, value_output


def gpt2(s: Sizes) -> list[Generator]:
    """[in, out] matrices; c_attn is queries | keys | values; GELU; LayerNorm before each block; tied head."""
    found = []
    for i in range(s.layers):
        at = f"transformer.h.{i}"
        attn = linear(f"{at}.attn.c_attn", 3 * s.width, s.width, bias=True, in_out=True)
        out = linear(f"{at}.attn.c_proj", s.width, s.width, bias=True, in_out=True)
        fc = linear(f"{at}.mlp.c_fc", s.neurons, s.width, bias=True, in_out=True)
        thirds = tuple(starts(s.heads, s.size, third * s.width) for third in range(3))
        found += fused(attn, out, s, (thirds[0], thirds[1], thirds[2]))
        found += norm_gain(gain(f"{at}.ln_1", s, bias=True), [attn])
        found += norm_gain(gain(f"{at}.ln_2", s, bias=True), [fc])
    return found


def _llama_like(s: Sizes, biases: str = "", normalised: bool = False) -> list[Generator]:
    """RoPE on grouped queries, gated MLP, RMSNorm before each block, untied head.

    If queries and keys are normalised head by head, only the gains of those two norms scale against each other.
    """
    found = []
    for i in range(s.layers):
        at = f"model.layers.{i}"
        q, k, v, o = projections(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), s, biases)
        gate, up, down = gated(f"{at}.mlp", s.width, s.neurons)
        found += separate(q, k, v, o, s, exact_query_key=not normalised)
        if normalised:
            found += _head_gains(f"{at}.self_attn", s)
        found += up_down(up, 0, down)
        found += norm_gain(gain(f"{at}.input_layernorm", s), [q, k, v])
        found += norm_gain(gain(f"{at}.post_attention_layernorm", s), [gate, up])
    return found + final("model.norm", s)


def _head_gains(prefix: str, s: Sizes, offset: int = 0) -> list[Generator]:
    """One gain over the channels of a head, shared by all heads: half the channels are free."""
    query, key = (Gain(f"{prefix}.{name}.weight", s.size, None, offset) for name in ("q_norm", "k_norm"))
    return query_key_gain(query, (0,), key, (0,), s.size, s.rotated)


def llama(s: Sizes) -> list[Generator]:
    """No biases. Mistral is the same."""
    return _llama_like(s)


mistral = llama


def qwen2(s: Sizes) -> list[Generator]:
    """Biases on queries, keys and values."""
    return _llama_like(s, biases="qkv")


def qwen3(s: Sizes) -> list[Generator]:
    """Normalised queries and keys."""
    return _llama_like(s, normalised=True)


def phi3(s: Sizes) -> list[Generator]:
    """qkv_proj is queries | keys | values, gate_up_proj is gate | up; RoPE on the first channels; untied head."""
    found = []
    query_rows, key_rows = s.heads * s.size, s.groups * s.size
    for i in range(s.layers):
        at = f"model.layers.{i}"
        qkv = linear(f"{at}.self_attn.qkv_proj", query_rows + 2 * key_rows, s.width)
        o = linear(f"{at}.self_attn.o_proj", s.width, query_rows)
        gate_up = linear(f"{at}.mlp.gate_up_proj", 2 * s.neurons, s.width)
        queries, keys = starts(s.heads, s.size), starts(s.groups, s.size, query_rows)
        values = starts(s.groups, s.size, query_rows + key_rows)
        found += fused(qkv, o, s, (queries, keys, values))
        found += up_down(gate_up, s.neurons, linear(f"{at}.mlp.down_proj", s.width, s.neurons))
        found += norm_gain(gain(f"{at}.input_layernorm", s), [qkv])
        found += norm_gain(gain(f"{at}.post_attention_layernorm", s), [gate_up])
    return found + final("model.norm", s)


def _gemma(s: Sizes, normalised: bool) -> list[Generator]:
    """Gains are used as 1 + w; norms before and after each block, of which only the former scale; tied head."""
    found = []
    for i in range(s.layers):
        at = f"model.layers.{i}"
        q, k, v, o = projections(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), s)
        gate, up, down = gated(f"{at}.mlp", s.width, s.neurons)
        found += separate(q, k, v, o, s, exact_query_key=not normalised)
        if normalised:
            found += _head_gains(f"{at}.self_attn", s, offset=1)
        found += up_down(up, 0, down)
        found += norm_gain(gain(f"{at}.input_layernorm", s, offset=1), [q, k, v])
        found += norm_gain(gain(f"{at}.pre_feedforward_layernorm", s, offset=1), [gate, up])
    return found


def gemma2(s: Sizes) -> list[Generator]:
    """The cap on the scores acts on q . k, which does not change."""
    return _gemma(s, normalised=False)


def gemma3(s: Sizes) -> list[Generator]:
    """Normalised queries and keys."""
    return _gemma(s, normalised=True)


def gpt_neox(s: Sizes) -> list[Generator]:
    """query_key_value holds query, key, value of each head in turn; RoPE on the first channels; GELU; untied head."""
    found = []
    for i in range(s.layers):
        at = f"gpt_neox.layers.{i}"
        qkv = linear(f"{at}.attention.query_key_value", 3 * s.width, s.width, bias=True)
        o = linear(f"{at}.attention.dense", s.width, s.width, bias=True)
        up = linear(f"{at}.mlp.dense_h_to_4h", s.neurons, s.width, bias=True)
        turns = tuple(starts(s.heads, 3 * s.size, turn * s.size) for turn in range(3))
        found += fused(qkv, o, s, (turns[0], turns[1], turns[2]))
        found += norm_gain(gain(f"{at}.input_layernorm", s, bias=True), [qkv])
        found += norm_gain(gain(f"{at}.post_attention_layernorm", s, bias=True), [up])
    return found + final("gpt_neox.final_layer_norm", s, bias=True, head="lm_head")


def _opt(s: Sizes, norm_first: bool) -> list[Generator]:
    """Biases everywhere, ReLU, tied head. A norm behind its block feeds the residual, so its gain does not scale."""
    found = []
    for i in range(s.layers):
        at = f"model.decoder.layers.{i}"
        q, k, v, o = projections(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj", "out_proj"), s, "qkvo")
        up = linear(f"{at}.fc1", s.neurons, s.width, bias=True)
        down = linear(f"{at}.fc2", s.width, s.neurons, bias=True)
        found += separate(q, k, v, o, s)
        found += up_down(up, 0, down, signs="positive")
        if norm_first:
            found += norm_gain(gain(f"{at}.self_attn_layer_norm", s, bias=True), [q, k, v])
            found += norm_gain(gain(f"{at}.final_layer_norm", s, bias=True), [up])
    return found


def opt(s: Sizes) -> list[Generator]:
    """Norms before each block."""
    return _opt(s, norm_first=True)


def opt_post_norm(s: Sizes) -> list[Generator]:
    """Norms behind each block, as in the 350M model."""
    return _opt(s, norm_first=False)


def _falcon(s: Sizes, norms: Sequence[str]) -> list[Generator]:
    """Each group's queries, its key, its value in turn; attention and GELU MLP side by side; tied head, no biases.

    Two names of norms are one for attention and one for the MLP; a single norm feeds both.
    """
    found = []
    share = s.heads // s.groups
    for i in range(s.layers):
        at = f"transformer.h.{i}"
        qkv = linear(f"{at}.self_attention.query_key_value", (s.heads + 2 * s.groups) * s.size, s.width)
        o = linear(f"{at}.self_attention.dense", s.width, s.heads * s.size)
        up = linear(f"{at}.mlp.dense_h_to_4h", s.neurons, s.width)
        stride = (share + 2) * s.size
        queries = [at_ for g in range(s.groups) for at_ in starts(share, s.size, g * stride)]
        keys, values = (starts(s.groups, stride, (share + after) * s.size) for after in (0, 1))
        found += fused(qkv, o, s, (queries, keys, values))
        gains = [gain(f"{at}.{norm}", s, bias=True) for norm in norms]
        if len(gains) == 1:
            found += norm_gain(gains[0], [qkv, up])
        else:
            found += norm_gain(gains[0], [qkv]) + norm_gain(gains[1], [up])
    return found


def falcon_7b(s: Sizes) -> list[Generator]:
    """One key/value head, one norm."""
    return _falcon(s, ("input_layernorm",))


def falcon_40b(s: Sizes) -> list[Generator]:
    """Grouped queries, two norms."""
    return _falcon(s, ("ln_attn", "ln_mlp"))


def olmo2(s: Sizes) -> list[Generator]:
    """Norms behind each block; queries and keys are normalised over all heads at once, each channel with its gain."""
    found = []
    for i in range(s.layers):
        at = f"model.layers.{i}"
        q, k, v, o = projections(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), s)
        _, up, down = gated(f"{at}.mlp", s.width, s.neurons)
        query = Gain(f"{at}.self_attn.q_norm.weight", s.heads * s.size)
        key = Gain(f"{at}.self_attn.k_norm.weight", s.groups * s.size)
        found += separate(q, k, v, o, s, exact_query_key=False)
        found += query_key_gain(query, starts(s.heads, s.size), key, starts(s.groups, s.size), s.size, s.rotated)
        found += up_down(up, 0, down)
    return found + final("model.norm", s)


def _experts(prefix: str, s: Sizes, neurons: int) -> tuple[list[Generator], list[Linear]]:
    """Routed experts, gate | up in one tensor: the pair of each expert, and all that reads their norm."""
    gate_up, down = f"{prefix}.experts.gate_up_proj", f"{prefix}.experts.down_proj"
    found = []
    for e in range(s.experts):
        up_e = Linear(gate_up, 2 * neurons, s.width, dims=3, expert=e)
        found += up_down(up_e, neurons, Linear(down, s.width, neurons, dims=3, expert=e))
    return found, [Linear(gate_up, 2 * neurons, s.width, dims=3), linear(f"{prefix}.gate", s.experts, s.width)]


def mixtral(s: Sizes) -> list[Generator]:
    """As Llama, with experts behind a router that reads the same norm."""
    found = []
    for i in range(s.layers):
        at = f"model.layers.{i}"
        q, k, v, o = projections(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj", "o_proj"), s)
        of_experts, readers = _experts(f"{at}.mlp", s, s.neurons)
        found += separate(q, k, v, o, s) + of_experts
        found += norm_gain(gain(f"{at}.input_layernorm", s), [q, k, v])
        found += norm_gain(gain(f"{at}.post_attention_layernorm", s), readers)
    return found + final("model.norm", s)


def deepseek_v3(s: Sizes) -> list[Generator]:
    """Latent attention, with interleaved RoPE on one key that all heads share; one dense layer, then experts.

    Each head of q_b_proj is un-rotated | rotated queries, of kv_b_proj un-rotated keys | values; kv_a_proj_with_mqa
    is latent | rotated key. Each latent vector has a norm of its own.
    """
    found = []
    for i in range(s.layers):
        at = f"model.layers.{i}"
        attn = f"{at}.self_attn"
        q_a = linear(f"{attn}.q_a_proj", Q_RANK, s.width)
        q_b = linear(f"{attn}.q_b_proj", s.heads * (s.size + s.rotated), Q_RANK)
        kv_a = linear(f"{attn}.kv_a_proj_with_mqa", KV_RANK + s.rotated, s.width)
        kv_b = linear(f"{attn}.kv_b_proj", s.heads * (s.size + VALUE_SIZE), KV_RANK)
        o = linear(f"{attn}.o_proj", s.width, s.heads * VALUE_SIZE)
        still, turning = (starts(s.heads, s.size + s.rotated, first) for first in (0, s.size))
        keys, values = (starts(s.heads, s.size + VALUE_SIZE, first) for first in (0, s.size))
        found += query_key(q_b, still, kv_b, keys, s.size)
        found += query_key(q_b, turning, kv_a, (KV_RANK,), s.rotated, s.rotated, interleaved=True)
        found += value_output(kv_b, values, o, starts(s.heads, VALUE_SIZE), VALUE_SIZE)
        found += norm_gain(Gain(f"{attn}.q_a_layernorm.weight", Q_RANK), [q_b])
        found += norm_gain(Gain(f"{attn}.kv_a_layernorm.weight", KV_RANK), [kv_b])
        found += norm_gain(gain(f"{at}.input_layernorm", s), [q_a, kv_a])
        if i == 0:
            gate, up, down = gated(f"{at}.mlp", s.width, s.neurons)
            readers = [gate, up]
        else:
            gate, up, down = gated(f"{at}.mlp.shared_experts", s.width, SHARED_NEURONS)
            of_experts, readers = _experts(f"{at}.mlp", s, EXPERT_NEURONS)
            found += of_experts
            readers += [gate, up]
        found += up_down(up, 0, down)
        found += norm_gain(gain(f"{at}.post_attention_layernorm", s), readers)
    return found + final("model.norm", s)


def _t5(s: Sizes, version_1_1: bool) -> list[Generator]:
    """Norms before each block; the encoder's last norm feeds the cross-attention of every decoder layer."""
    found: list[Generator] = []

    def attention(at: str) -> tuple[Linear, Linear, Linear]:
        q, k, v, o = projections(at, "qkvo", s)
        found.extend(separate(q, k, v, o, s))
        return q, k, v

    def feed_forward(at: str) -> None:
        names = ("wi_0", "wi_1", "wo") if version_1_1 else ("wi", "wi", "wo")
        gate, up, down = gated(f"{at}.DenseReluDense", s.width, s.neurons, names)
        found.extend(up_down(up, 0, down, signs="any" if version_1_1 else "positive"))
        found.extend(norm_gain(gain(f"{at}.layer_norm", s), [gate, up] if version_1_1 else [up]))

    crossing: list[Linear] = []
    for i in range(s.layers):
        at = f"encoder.block.{i}.layer"
        found += norm_gain(gain(f"{at}.0.layer_norm", s), attention(f"{at}.0.SelfAttention"))
        feed_forward(f"{at}.1")
    for i in range(s.layers):
        at = f"decoder.block.{i}.layer"
        found += norm_gain(gain(f"{at}.0.layer_norm", s), attention(f"{at}.0.SelfAttention"))
        q, k, v = attention(f"{at}.1.EncDecAttention")
        found += norm_gain(gain(f"{at}.1.layer_norm", s), [q])
        crossing += [k, v]
        feed_forward(f"{at}.2")
    return found + norm_gain(gain("encoder.final_layer_norm", s), crossing)


def t5(s: Sizes) -> list[Generator]:
    """ReLU; tied head."""
    return _t5(s, version_1_1=False)


def t5_v1_1(s: Sizes) -> list[Generator]:
    """Gated GELU, of which only the linear factor wi_1 scales; untied head."""
    return _t5(s, version_1_1=True) + final("decoder.final_layer_norm", s)


def bert(s: Sizes) -> list[Generator]:
    """Norms behind each block feed the residual too, but for the very last one: only the head's first layer reads it.

    GELU; tied head.
    """
    found = []
    for i in range(s.layers):
        at = f"bert.encoder.layer.{i}.attention"
        q, k, v, o = projections(at, ("self.query", "self.key", "self.value", "output.dense"), s, "qkvo")
        found += separate(q, k, v, o, s)
    last = gain(f"bert.encoder.layer.{s.layers - 1}.output.LayerNorm", s, bias=True)
    return found + norm_gain(last, [linear("cls.predictions.transform.dense", s.width, s.width)])


def vit(s: Sizes) -> list[Generator]:
    """Norms before each block; GELU; the last norm feeds the classifier."""
    found = []
    for i in range(s.layers):
        at = f"vit.layers.{i}"
        q, k, v, o = projections(f"{at}.attention", ("q_proj", "k_proj", "v_proj", "o_proj"), s, "qkvo")
        found += separate(q, k, v, o, s)
        found += norm_gain(gain(f"{at}.layernorm_before", s, bias=True), [q, k, v])
        found += norm_gain(gain(f"{at}.layernorm_after", s, bias=True), [linear(f"{at}.mlp.fc1", s.neurons, s.width)])
    return found + final("vit.layernorm", s, bias=True, head="classifier", head_bias=True)


def whisper(s: Sizes) -> list[Generator]:
    """Norms before each block; keys have no bias; GELU; tied head; one encoder norm for all cross-attention."""
    found: list[Generator] = []

    def attention(at: str) -> tuple[Linear, Linear, Linear]:
        q, k, v, o = projections(at, ("q_proj", "k_proj", "v_proj", "out_proj"), s, "qvo")
        found.extend(separate(q, k, v, o, s))
        return q, k, v

    crossing: list[Linear] = []
    for part in ("encoder", "decoder"):
        for i in range(s.layers):
            at = f"model.{part}.layers.{i}"
            readers = attention(f"{at}.self_attn")
            found += norm_gain(gain(f"{at}.self_attn_layer_norm", s, bias=True), readers)
            if part == "decoder":
                q, k, v = attention(f"{at}.encoder_attn")
                found += norm_gain(gain(f"{at}.encoder_attn_layer_norm", s, bias=True), [q])
                crossing += [k, v]
            up = linear(f"{at}.fc1", s.neurons, s.width)
            found += norm_gain(gain(f"{at}.final_layer_norm", s, bias=True), [up])
    return found + norm_gain(gain("model.encoder.layer_norm", s, bias=True), crossing)
