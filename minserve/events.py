"""What a commit tells of a request: a token that was accepted, or its end.

Pure: reads a request, changes nothing. It must not know queues, blocks or text.
"""

from __future__ import annotations

from minserve.request import FinishReason, Request, RequestError, TokenEvent, TokenLogprob, Usage


def finish_reason(request: Request) -> FinishReason | None:
    """What the last token means: the end by its id or by their number, or None."""
    params = request.params
    if request.tokens[-1] in params.stop_token_ids and request.output_len > params.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if request.output_len >= params.max_tokens else None


def token_event(
    request: Request,
    logprob: TokenLogprob | None,
    finish: FinishReason | None,
    prompt_logprobs: tuple[TokenLogprob, ...],
) -> TokenEvent:
    """Of the last token."""
    usage = None if finish is None else _usage(request)
    index, token = request.output_len - 1, request.tokens[-1]
    return TokenEvent(request.id, index, token, logprob, finish, None, usage, prompt_logprobs)


def end_event(
    request: Request, error: RequestError | None = None, prompt_logprobs: tuple[TokenLogprob, ...] = ()
) -> TokenEvent:
    """An end without a token."""
    usage = _usage(request)
    return TokenEvent(request.id, request.output_len, -1, None, request.finish, error, usage, prompt_logprobs)


def no_valid_token() -> RequestError:
    return RequestError("The model left no token that may come next.", status=500, code="no_valid_token")


def _usage(request: Request) -> Usage:
    return Usage(request.prompt_len, request.cached, request.output_len)
