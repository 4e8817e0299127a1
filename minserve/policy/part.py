"""What one running request has of the step that is being planned, in blocks, tokens and logit rows.

Pure numbers. It must not know of other requests, nor what a step may use.
"""

from __future__ import annotations

from dataclasses import dataclass

from minserve.request import Chunk, View


@dataclass(slots=True)
class Part:
    """held: blocks. debt: blocks it lacks for the rest of its known tokens, which admissions leave to it, so that who
    runs gets there without preemption. count: tokens of its chunk, without drafts."""

    view: View
    held: int
    debt: int
    count: int = 0
    draft: tuple[int, ...] = ()
    forks: tuple[str, ...] = ()

    @property
    def end(self) -> int:
        return self.view.computed + self.count

    @property
    def most(self) -> int:
        """Where its chunk ends at the latest: at the prompt's end, or that of the tokens that were generated."""
        view = self.view
        return view.prompt_len if view.computed < view.prompt_len else view.known

    @property
    def samples(self) -> bool:
        """The chunk reaches the end of the known tokens, and another one is wanted."""
        return self.end == self.view.known < self.view.limit

    def scored(self, end: int) -> int:
        """Rows to score in a chunk that ends at `end`."""
        return max(0, min(end, self.view.scored[1]) - max(self.view.computed, self.view.scored[0]))

    def extra_rows(self, end: int) -> int:
        """Logit rows of a chunk up to `end`, beyond the one that every seat keeps."""
        return max(0, self.scored(end) + (end == self.view.known < self.view.limit) - 1)

    def chunk(self) -> Chunk:
        view, drafts = self.view, len(self.draft)
        samples = 1 + drafts if self.samples else 0
        scored = self.scored(self.end) if view.scored[1] else 0
        return Chunk(view.id, view.computed, self.count + drafts, samples, self.draft, scored, self.forks)
