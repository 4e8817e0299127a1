"""Fields of OpenAI's and other servers' requests that are known here and refused.

Owns their names, and the values that ask for nothing. Fields that nobody here knows are ignored; one of these never is,
because an answer that silently lacks what was asked for is worse than a refusal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from minserve.request import RequestError

# Field -> the values that ask for nothing and may pass. Everything else is refused by name.
UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    # OpenAI
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": (),
    "input": (),
    "instructions": (),
    "max_output_tokens": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "reasoning": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none",),
    "tools": (),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM, SGLang
    "bad_words": ([],),
    "beam_search": (False,),
    "chat_template": (),
    "custom_logit_processor": (),
    "documents": (),
    "ebnf": (),
    "extra_key": ("",),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_whitespace_pattern": (),
    "json_schema": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logit_processors": ([],),
    "logprob_token_ids": ([],),
    "lora": (),
    "lora_path": (),
    "lora_request": (),
    "mm_processor_kwargs": (),
    "no_stop_trim": (False,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "regex": (),
    "repetition_detection": (),
    "return_hidden_states": (False,),
    "separate_reasoning": (True,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "stop_regex": (),
    "structured_outputs": (),
    "thinking_token_budget": (),
    "token_ids_logprob": (),
    "truncate_prompt_tokens": (),
    "truncation_side": (),
    "use_beam_search": (False,),
    "vllm_xargs": (),
    # llama.cpp, Ollama, text-generation-webui, text-generation-inference, LMDeploy, TabbyAPI
    "adapter_id": (),
    "allowed_tokens": ([],),
    "bad_words_ids": ([],),
    "ban_eos_token": (False,),
    "banned_strings": ([],),
    "cache_prompt": (True,),
    "decoder_input_details": (False,),
    "do_sample": (True,),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "enable_thinking": (),
    "format": (),
    "grammar": (),
    "guidance_scale": (1, 1.0),
    "loop_detect_window": (0,),
    "max_length": (),
    "max_new_tokens": (),
    "min_new_tokens": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "n_cmpl": (1,),
    "n_predict": (),
    "n_probs": (0,),
    "negative_prompt": ("",),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "num_ctx": (),
    "num_predict": (),
    "options": (),
    "penalty_alpha": (0, 0.0),
    "post_sampling_probs": (False,),
    "reasoning_budget_tokens": (-1,),
    "reasoning_format": ("auto", "deepseek"),
    "regex_pattern": (),
    "repeat_penalty": (1, 1.0),
    "repetition_ngram_size": (0,),
    "return_tokens": (False,),
    "samplers": (),
    "stop_sequences": ([],),
    "tfs_z": (1, 1.0),
    "think": (),
    "top_a": (0, 0.0),
    "top_n_sigma": (-1, -1.0, 0, 0.0),
    "top_n_tokens": (0,),
    "truncate": (),
    "typical": (1, 1.0),
    "typical_p": (1, 1.0),
    "xtc_probability": (0, 0.0),
}

_CHAT_ONLY: Mapping[str, tuple[Any, ...]] = {"add_special_tokens": (False,), "echo": (False,), "prompt": ()}
_COMPLETION_ONLY: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (False,),
    "add_special_tokens": (True,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "include_reasoning": (True,),
    "messages": (),
    "reasoning_effort": (),
    "top_logprobs": (),
}
# Of a message; what SDKs send back of an answer that had none of it is null or empty.
_MESSAGE_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None, ""),
}
# At /tokenize, by llama.cpp's names: special tokens written in a text count, and `content` gets none added.
TOKENIZE_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "add_special": (False,),
    "parse_special": (True,),
    "tools": (),
    "with_pieces": (False,),
}


def refuse_unsupported(fields: Mapping[str, Any], *, chat: bool) -> None:
    """RequestError 400 for the first field that asks for something this server can't do."""
    for table in (UNSUPPORTED, _CHAT_ONLY if chat else _COMPLETION_ONLY):
        refuse_of(table, fields)
    messages = fields.get("messages")
    for place, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            refuse_of(_MESSAGE_UNSUPPORTED, message, f"messages[{place}].")


def refuse_of(table: Mapping[str, tuple[Any, ...]], fields: Mapping[str, Any], where: str = "") -> None:
    """The same for the fields of one table. where: what stands before their names."""
    for name, neutral in table.items():
        if name in fields and not _asks_nothing(fields[name], neutral):
            raise RequestError(
                f"This server does not support `{where}{name}`{_unless(neutral)}.",
                code="unsupported_parameter",
                param=where + name,
            )


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    return any(type(value) is type(candidate) and value == candidate for candidate in neutral)


def _unless(neutral: tuple[Any, ...]) -> str:
    return f" other than {msgspec.json.encode(neutral[0]).decode()}" if neutral else ""
