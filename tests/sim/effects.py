"""For each kind of fault a counter that must have moved over many seeds: a fault that shows no effect proves nothing."""

from __future__ import annotations

EFFECTS = {
    "crash": "deaths", "power loss": "dark", "crash loop": "deaths", "freeze node": "loss: node silent",
    "freeze head": "head overslept", "pause head": "head overslept", "pause node": "node paused",
    "partition": "bytes held", "half to node": "bytes held", "half to head": "bytes held",
    "reset": "resets", "flip": "flipped", "raw flip": "flipped raw", "truncate": "truncated",
    "delay": "delayed", "jitter": "delayed", "duplicate link": "two links of one head",
    "deaf node": "resets", "late OPEN": "late OPEN judged", "stale OPEN": "stale OPEN refused",
    "hang": "loss: engine hung", "slow engine": "slowed", "lane fault": "closed: lane_fault",
    "drain": "closed: draining", "terminate": "loss: node going away", "goaway race": "refused: draining",
    "boot jump": "closed: fenced", "starve leases": "renews withheld", "busy": "refused: rate_limit_exceeded",
    "wrong weights": "weights refused", "head crash": "head deaths", "head power loss": "head deaths",
    "faulty node": "forged", "burst": "bursts", "half frame": "half frames", "half close": "half closed", "poison": "quarantined", "slow client": "slow: waiting",
    "client leaves": "end: left", "drift": "drifting", "single return": "single returns",
    "rekey": "relinked",
}  # fmt: skip
