"""What a live view says of requests."""

from minserve.request import Pool
from minserve.status import LiveRequest
from tests.engines import PROMPT, submission, tiny


def test_who_lost_its_blocks_is_told_from_who_has_not_started() -> None:
    engine = tiny(num_blocks=8, max_num_seqs=1).engine
    engine.submit(submission([1, *PROMPT], "bulk", pool=Pool.BULK))
    engine.step()
    engine.submit(submission(PROMPT, "first", max_tokens=2))
    engine.submit(submission(PROMPT, "second", max_tokens=2))
    engine.step()
    phases = {live.id: live.phase for live in map(LiveRequest.of, engine.scheduler.requests.values())}
    assert phases == {"bulk#0": "preempted", "first#0": "decode", "second#0": "queued"}
    assert [engine.progress(name).phase for name in ("bulk", "first", "second")] == ["preempted", "decode", "queued"]
