"""Any causal language model of transformers: load it, name its parts, write a text token by token.

Prompts are padded on the right to one of the planned lengths, and keys and values lie in buffers of one size, so that
one graph serves all prompts of a length, and one more all further tokens. Knows nothing of caches of compiled code.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers.utils.logging
from huggingface_hub import snapshot_download
from tokenizers.decoders import DecodeStream
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, TemperatureLogitsWarper, TopPLogitsWarper
from transformers.cache_utils import Cache, StaticLayer

from warmstart.models import ModelError, Request, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# Relative to the largest logit. Two ways to the same logits round differently, in half precision by up to a hundredth;
# a layer that reads another's keys is off by far more.
_TOLERANCE = 0.05


class CausalModel:
    """A language model and its tokenizer, on their device.

    Inputs of a request are `prompt`, `max_new_tokens`, and as wanted `temperature` (0, the default, takes the likeliest
    token), `top_p` and `stop`, a list of strings: the text ends before the first of them. In place of `prompt` there
    may be `messages`, each with `role` and `content`, for a model whose tokenizer has a chat template. A planned
    request also has `prefill`, the length in tokens to which prompts are padded (1 is the step that makes each further
    token, too), and `cache_tokens`, the most that prompt and text have together.

    Args:
        source: a directory in transformers layout, or a hub id.
        revision: commit or tag of a hub id.
        device: "cpu", "cuda" or "cuda:N".
        dtype: name of the precision in torch, "bfloat16" say.
        plan: the requests that are planned. Their lengths are all that prompts are padded to.

    Raises:
        ModelError: the model cannot be loaded, or cannot work in the planned lengths.
    """

    def __init__(self, source: str, *, revision: str = "", device: str, dtype: str, plan: Sequence[Request]) -> None:
        _quiet()
        local = Path(source).is_dir()
        # Weights that are pickles, or code beside them, could run when they are read.
        options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
        try:
            directory = source if local else _fetched(source, revision)
            load: Any = AutoModelForCausalLM.from_pretrained
            model = load(directory, dtype=getattr(torch, dtype), use_safetensors=True, **options)
            self._tokenizer: Any = AutoTokenizer.from_pretrained(directory, **options)
            # Without tokenizer.json there is none, and text cannot be streamed.
            self._words: Any = self._tokenizer.backend_tokenizer
        # Loading runs code of many libraries; whatever it raises means that there is no model.
        except Exception as error:
            remedy = "and that the directory is a complete transformers model with a tokenizer.json"
            if not local:
                remedy = "the revision, the network and HF_TOKEN; or have it in the image by scripts/fetch_weights"
            raise ModelError(
                f"the language model {source!r} cannot be loaded ({type(error).__name__}: {error}); without it there is"
                f" nothing to serve. Check WARMSTART_MODEL, {remedy}."
            ) from error
        self._model: Any = model.to(device).eval()
        self._labels, self._size = _lengths(plan, self._model.config.get_text_config())
        with torch.inference_mode():
            self._buffers = _arrange(self._model, self._size)
        self._free = [self._buffers]
        self._ends = _ends(self._model.generation_config, self._tokenizer)

    def parts(self) -> dict[str, nn.Module]:
        """The model as a whole; what repeats in it are its layers."""
        return {"model": self._model}

    def default_parts(self) -> tuple[str, ...]:
        """The one part."""
        return ("model",)

    def label(self, request: Request) -> str:
        """The label of the planned request whose length this one's prompt is padded to."""
        return self._labels[self._length(request, self._numbers(request))]

    def lora_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """LoRA weights by part and layer; peft names them by the model that it wraps."""
        return {f"model.{name.removeprefix('base_model.model.')}": tensor for name, tensor in tensors.items()}

    def run(self, request: Request) -> list[Any]:
        """Writes the whole text."""
        return ["".join(self.stream(request))]

    def stream(self, request: Request) -> Iterator[str]:
        """Writes the text of one request: a piece for each token, empty where a character is not complete yet.

        A piece is empty too where it may be the beginning of one of `stop`; if it was none, it is in a later one.
        Several may be under way at once, each in buffers of its own, though only one at a time may be advanced.

        Raises:
            RequestError: the prompt, or what is to follow it, is too long; or an input is of no use.
        """
        numbers, limit = self._numbers(request), int(_number(request, "max_new_tokens", 0, 1))
        length = self._length(request, numbers)
        if len(numbers) + limit > self._size:
            raise RequestError(
                f"the prompt has {len(numbers)} tokens, and {limit} more are asked for, but there is room for"
                f" {self._size} together; ask for {self._size - len(numbers)} at most, or shorten the prompt."
            )
        choose = _chooser(request)
        # A planned request takes each of its steps, whatever the model would say.
        ends = frozenset() if "prefill" in request.inputs else self._ends
        words = DecodeStream(ids=numbers, skip_special_tokens=True)
        text = _Stopping(() if "prefill" in request.inputs else _stops(request))
        # Whoever stops half way leaves its buffers to the garbage collector: no lock, and nothing to be put in order.
        buffers = self._free.pop() if self._free else self._buffers.fresh()
        # What is padded writes keys that nobody sees: a token sees those before it, all of which are written by then.
        padding = numbers[-1:] * (length - len(numbers))
        logits = self._logits(buffers, numbers + padding, start=0, last=len(numbers) - 1)
        for end in range(len(numbers) + 1, len(numbers) + limit + 1):
            if (token := choose(logits)) in ends:
                break
            last = end == len(numbers) + limit
            yield text.add(words.step(self._words, token) or "", last=last)
            if last or text.stopped:
                break
            logits = self._logits(buffers, [token], start=end - 1, last=0)
        if text.held:
            yield text.held
        self._free.append(buffers)

    def _logits(self, buffers: _Buffers, numbers: list[int], *, start: int, last: int) -> Tensor:
        """Runs the model over tokens from `start` on and returns the logits after the one at `last`, (vocabulary,)."""
        buffers.start.fill_(start)
        device = buffers.start.device
        logits: Tensor = self._model(
            input_ids=torch.tensor([numbers], device=device),
            cache=buffers,
            use_cache=True,
            logits_to_keep=torch.tensor([last], device=device),
        ).logits[0]
        # Some models give all of them whatever is asked for.
        return logits[last if len(logits) > 1 else 0]

    def _numbers(self, request: Request) -> list[int]:
        """The tokens of the prompt, at least one."""
        prompt, messages = (request.inputs.get(name) for name in ("prompt", "messages"))
        if (prompt is None) is (messages is None):
            raise RequestError("the request has neither prompt nor messages, or both; give one of them.")
        text = _text("the prompt", prompt) if messages is None else self._chat(messages)
        # A template begins the text by itself.
        begins = messages is None
        numbers: list[int] = self._tokenizer(text, add_special_tokens=begins, verbose=False)["input_ids"]
        if numbers:
            return numbers
        begin = self._tokenizer.bos_token_id
        return [begin if begin is not None else min(self._ends, default=0)]

    def _chat(self, messages: Sequence[dict[str, str]]) -> str:
        """Messages in the format that the model was taught, and the beginning of its answer."""
        fit = isinstance(messages, (list, tuple)) and all(isinstance(message, Mapping) for message in messages)
        if not fit or not all({"role", "content"} <= message.keys() for message in messages):
            raise RequestError(f"messages are {messages!r:.200}; give a list, each with role and content.")
        if not self._tokenizer.chat_template:
            raise RequestError(
                "there are messages, but the model's tokenizer has no chat template, so it was taught no format for"
                " them; ask with a prompt."
            )
        try:
            text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        # The boundary: a template is the model's own program.
        except Exception as error:
            raise RequestError(
                f"the model's chat template refuses these messages ({error}); give a list of messages, each with role"
                " and content, in an order that the model was taught."
            ) from error
        return _text("what the chat template makes of the messages", text)

    def _length(self, request: Request, numbers: list[int]) -> int:
        planned = request.inputs.get("prefill")
        for length in self._labels if planned is None else [int(planned)]:
            if len(numbers) <= length:
                return length
        raise RequestError(
            f"the prompt has {len(numbers)} tokens, and the longest that this server is prepared for has"
            f" {max(self._labels)}; shorten it, or plan a longer prefill in the Predictor."
        )


def _text(what: str, value: Any) -> str:
    """A value as text that a tokenizer takes."""
    # JSON may hold half of a pair of surrogates, which is no character.
    if isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value):
        return value
    raise RequestError(f"{what} is {value!r:.200}, which is no text; give a string of whole characters.")


def _number(request: Request, name: str, default: float, least: float, most: float = math.inf) -> float:
    """A numeric input of a request, or its default."""
    value = request.inputs.get(name, default)
    if isinstance(value, (int, float)) and least <= value <= most:
        return value
    allowed = f"of at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
    raise RequestError(f"{name} is {value!r:.200}; give a number {allowed}.")


def _stops(request: Request) -> Sequence[str]:
    stops = request.inputs.get("stop", ())
    if not isinstance(stops, (list, tuple)) or not all(isinstance(stop, str) for stop in stops):
        raise RequestError(f"stop is {stops!r:.200}; give a list of strings, empty to stop at none.")
    return stops


class _Stopping:
    """A text that ends before the first of some strings.

    Attributes:
        held: what may be the beginning of one of them, and is part of the text if the text ends with it.
        stopped: whether one of them came.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.held = ""
        self.stopped = False
        self._stops = [stop for stop in stops if stop]

    def add(self, piece: str, *, last: bool = False) -> str:
        """Takes the next piece of what the model writes; returns what of the text is certain by now."""
        text = self.held + piece
        if found := [(place + len(stop), place) for stop in self._stops if (place := text.find(stop)) >= 0]:
            self.held, self.stopped = "", True
            return text[: min(found)[1]]  # before the one that is complete first
        begun = 0 if last else max((_begun(text, stop) for stop in self._stops), default=0)
        self.held = text[len(text) - begun :]
        return text[: len(text) - begun]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a string."""
    return next((size for size in range(min(len(stop), len(text)), 0, -1) if text.endswith(stop[:size])), 0)


def _fetched(model: str, revision: str) -> str:
    """The directory of what a boot loads of a model at the hub.

    In one step: transformers asks for each file that a model may have, and each time waits for a hub that is not
    there, minutes in all.
    """
    # Some come with a second copy of their weights, for another library, in a directory or by this name.
    kinds = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
    return snapshot_download(
        model, revision=revision or None, allow_patterns=kinds, ignore_patterns=["*/*", "consolidated*"]
    )


class _Slots(StaticLayer):  # type: ignore[misc]
    """One layer's keys and values, each (1, heads, tokens, width), written from `cumulative_length` on.

    Unlike transformers' own it leaves that number alone, so a layer that is run twice (the self-check, a call that is
    repeated uncompiled) writes the same places again. Nor does it mark its tensors as being at fixed addresses, since
    another text has others.
    """

    # Set at the first step, which no compiled code takes.
    keys: Tensor
    values: Tensor

    def __init__(self, size: int, start: Tensor) -> None:
        super().__init__(max_cache_len=size)
        self.cumulative_length = start

    def fresh(self, start: Tensor) -> _Slots:
        """Others as these, empty."""
        other = _Slots(self.max_cache_len, start)
        other.lazy_initialization(self.keys, self.values)
        return other

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the buffers, of which the first keys and values show the shapes."""
        self.keys, self.values = (
            states.new_zeros((*states.shape[:2], self.max_cache_len, states.shape[-1]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Writes the keys and values of some tokens and returns those of all places."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        places = torch.arange(key_states.shape[-2], device=key_states.device) + self.cumulative_length
        self.keys.index_copy_(2, places, key_states)
        self.values.index_copy_(2, places, value_states)
        return self.keys, self.values


class _Alone(Cache):  # type: ignore[misc]
    """The slots of one layer. It does not ask for the layer's number, so torch does not guard on it."""

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return self.layers[0].update(key_states, value_states)  # type: ignore[no-any-return]


class _Buffers(Cache):  # type: ignore[misc]
    """The slots of all layers.

    Attributes:
        slots: one for each layer.
        start: where the next tokens are written, a number that all slots share.
        of: the slots of each layer alone.
    """

    def __init__(self, slots: list[_Slots], start: Tensor) -> None:
        super().__init__(layers=list(slots))
        self.slots = slots
        self.start = start
        self.of = [_Alone(layers=[one]) for one in slots]

    def fresh(self) -> _Buffers:
        """As these, for another text."""
        start = torch.zeros_like(self.start)
        return _Buffers([one.fresh(start) for one in self.slots], start)


def _arrange(model: Any, size: int) -> _Buffers:
    """Has each layer see its own slots alone, and tries whether the model says the same with them.

    Were each to find its slots among all by its number, torch would guard on that, and each need graphs of its own.

    Raises:
        ModelError: the model cannot keep keys and values in buffers.
    """
    device = model.device
    tokens = torch.arange(3, device=device)[None]
    plain = model(input_ids=tokens, use_cache=False).logits[0, -1]
    layers = _layers(model)
    for number, layer in enumerate(layers):
        kind: Any = type(layer)
        layer.__class__ = _seeing_its_own(kind)
        layer.warmstart_number = number
    start = torch.zeros((), dtype=torch.long, device=device)
    buffers = _Buffers([_Slots(max(size, 3), start) for _ in layers], start)
    try:
        model(input_ids=tokens[:, :2], cache=buffers, use_cache=True)
        start.fill_(2)
        ours = model(input_ids=tokens[:, 2:], cache=buffers, use_cache=True).logits[0, -1]
        difference = ((ours - plain).abs().max() / plain.abs().max()).item()
        # Written so that a NaN fails too.
        if difference <= _TOLERANCE and all(one.is_initialized for one in buffers.slots):
            return buffers
        why = f"its logits are then off by {difference:.1e} of the largest"
    # A model with another kind of memory may fail anywhere.
    except Exception as error:  # noqa: BLE001
        why = f"{type(error).__name__}: {error}"
    raise ModelError(
        f"{type(model).__name__} cannot keep the keys and values of its {len(layers)} layers in buffers of a fixed size"
        f" ({why}), as language models are served here; serve it by other means, or another model."
    )


def _layers(model: nn.Module) -> list[Any]:
    """The layers: of the model's lists of modules the longest."""
    lists = [child for child in model.modules() if isinstance(child, nn.ModuleList)]
    return list(max(lists, key=len, default=[]))


@functools.cache
def _seeing_its_own(kind: Any) -> type[nn.Module]:
    """The class of a layer that gets its own slots in place of all. It has the same name, and the same forward.

    The exchange is in `__call__`, outside the compiled code, whose guards would have to tell one layer from another.
    """

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        def own(value: Any) -> Any:
            return value.of[self.warmstart_number] if isinstance(value, _Buffers) else value

        named = {name: own(value) for name, value in kwargs.items()}
        return kind.__call__(self, *(own(value) for value in args), **named)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _lengths(plan: Sequence[Request], config: Any) -> tuple[dict[int, str], int]:
    """The planned lengths, the shortest first, with their labels; and how many tokens there is room for."""
    try:
        labels = {int(request.inputs["prefill"]): request.label for request in plan}
        size = max(int(request.inputs["cache_tokens"]) for request in plan)
    except KeyError as error:
        raise ModelError(
            f"a planned request has no input {error}, without which it is not known what to prepare a language model"
            " for; give each prefill and cache_tokens, both in tokens."
        ) from None
    if max(labels) >= size:
        raise ModelError(
            f"a prefill of {max(labels)} tokens is planned, and cache_tokens is {size}, so no token could follow; plan"
            " more room."
        )
    context = getattr(config, "max_position_embeddings", None)
    if context and size > context:
        raise ModelError(
            f"cache_tokens is {size}, but the model was made for {context} tokens at most, beyond which it writes"
            f" nonsense; plan {context} or fewer."
        )
    return dict(sorted(labels.items())), size


def _ends(generation: Any, tokenizer: Any) -> frozenset[int]:
    """The tokens that end a text."""
    named = generation.eos_token_id if generation is not None else None
    ends = {tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])}
    return frozenset(number for number in ends if number is not None)


def _chooser(request: Request) -> Callable[[Tensor], int]:
    """What picks the next token from its logits, (vocabulary,); the same ones for the same seed."""
    temperature, top_p = _number(request, "temperature", 0, 0), _number(request, "top_p", 1, 0, 1)
    # On the CPU whatever the device is, so that a seed means the same on every machine's generator.
    generator = torch.Generator("cpu").manual_seed(request.seeds[0])

    def choose(logits: Tensor) -> int:
        scores: Any = logits[None].float().cpu()
        if scores.isnan().any():
            raise ModelError(
                "the model gave numbers that are none (NaN), so no token can be chosen; set WARMSTART_DTYPE to a"
                " precision with a wider range, bfloat16 or float32."
            )
        if temperature == 0:
            return int(scores.argmax())
        for warp in (TemperatureLogitsWarper(float(temperature)), TopPLogitsWarper(float(top_p))):
            scores = warp(None, scores)
        return int(torch.multinomial(scores.softmax(-1), 1, generator=generator))

    return choose


def _quiet() -> None:
    """Keeps bars, and a hint about torchvision, which no text needs, out of the setup log."""
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
