"""Over 600 requests that are wrong, as bytes, made from tables: lines, headers, framing, bodies on every route that takes one.

`requests(host, paths)` yields (name, bytes, is_whole). What is not whole ends in the middle, and the sender leaves the line open.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence

CRLF = b"\r\n"
DEEP = 100_000

LINES: list[bytes] = [
    b"", b" ", b"GET", b"GET /", b"GET  HTTP/1.1", b"GET / HTTP/9.9", b"GET / HTTP/1.", b"GET / XTTP/1.1", b"get /livez HTTP/1.1",
    b"G\xc3\x89T / HTTP/1.1", b"GET\t/\tHTTP/1.1", b"GET / HTTP/1.1 extra", b"PRI * HTTP/2.0", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET http://[::1 HTTP/1.1", b"GET //// HTTP/1.1", b"GET /%00 HTTP/1.1", b"GET /%zz HTTP/1.1", b"GET /\x00 HTTP/1.1", b"GET /\xff HTTP/1.1",
    b"GET * HTTP/1.1", b"OPTIONS * HTTP/1.1", b"CONNECT a:1 HTTP/1.1", b"TRACE / HTTP/1.1", b"PATCH /v1/models HTTP/1.1",
    b"DELETE /v1/models HTTP/1.1", b"BREW /coffee HTTP/1.1", b"GET /../../etc/passwd HTTP/1.1", b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1",
    b"GET /" + b"a" * 30_000 + b" HTTP/1.1", b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"GET /?" + b"&" * 20_000 + b" HTTP/1.1",
    b"GET ?x HTTP/1.1", b"GET #x HTTP/1.1", b"GET http://evil.example/v1/models HTTP/1.1", b"GET /v1/models\x0b HTTP/1.1",
    b"HTTP/1.1 200 OK", b"{}", b"\x00" * 100, b"\xff" * 100,
]  # fmt: skip

HEADERS: list[bytes] = [
    b"no colon", b": empty name", b"na me: x", b"name : x", b"x: a\x00b", b"x: a\nb", b"x\x80: a", b" folded: x", b"\tfolded: x",
    b"host: a\r\nhost: b", b"host: evil.example", b"host: [::1", b"host: ", b"host: \xff\xfe", b"host: 127.0.0.1:99999999",
    b"x: " + b"a" * 33_000, b"x: " + b"a" * 70_000, b"\r\n".join(b"h%d: v" % n for n in range(101)), b"\r\n".join(b"h%d: v" % n for n in range(2_000)),
    b"authorization: Bearer \xff\xff", b"authorization: " + b"Bearer " * 500, b"authorization: Basic Og==", b"x-api-key: \x7f",
    b"content-encoding: gzip", b"content-encoding: br, gzip", b"content-encoding: \xff", b"content-type: text/plain", b"content-type: \xff",
    b"content-type: multipart/form-data; boundary=x", b"content-type: application/json; charset=\xff", b"content-type: ;;;,",
    b"expect: 100-continue", b"expect: 200-maybe", b"upgrade: websocket\r\nconnection: upgrade", b"upgrade: h2c\r\nconnection: upgrade, http2-settings",
    b"connection: close, keep-alive", b"te: trailers", b"trailer: x", b"origin: null", b"origin: https://[", b"origin: \xff", b"origin: " + b"x" * 5_000,
    b"x-request-id: \x01\x02", b"x-request-id: " + b"r" * 5_000, b"idempotency-key: ", b"idempotency-key: \xff", b"idempotency-key: " + b"k" * 300,
    b"x-superfluid-qos: nope", b"x-superfluid-qos: \xff", b"x-superfluid-batch-invariant: perhaps", b"x-forwarded-for: ,,,;\xff",
    b"last-event-id: x", b"range: bytes=0-1,2-3,4-", b"cookie: " + b"a=b; " * 500,
]  # fmt: skip

FRAMINGS: list[bytes] = [
    b"content-length: -1", b"content-length: +5", b"content-length: 5, 6", b"content-length: 1e3", b"content-length: 0x5",
    b"content-length: 99999999999999999999", b"content-length: 999999999", b"content-length: 5\r\ncontent-length: 6", b"content-length: ",
    b"content-length: 5\r\ntransfer-encoding: chunked", b"transfer-encoding: chunked\r\ncontent-length: 0", b"transfer-encoding: gzip",
    b"transfer-encoding: chunked, identity", b"transfer-encoding: xchunked", b"transfer-encoding:chunked\r\ntransfer-encoding: chunked",
    b"transfer-encoding : chunked", b"transfer-encoding: \x0bchunked",
]  # fmt: skip
CHUNKS: list[bytes] = [
    b"zz\r\n{}\r\n0\r\n\r\n", b"-1\r\n{}\r\n0\r\n\r\n", b"2\n{}\n0\n\n", b"ffffffffffffffffff\r\n", b"2\r\n{}extra\r\n0\r\n\r\n", b"0x2\r\n{}\r\n0\r\n\r\n",
    b"2;" + b"e" * 40_000 + b"\r\n{}\r\n0\r\n\r\n", b"2\r\n{}\r\n0\r\n" + b"t: " + b"v" * 70_000 + b"\r\n\r\n", b"\r\n", b"2 \r\n{}\r\n0\r\n\r\n",
]  # fmt: skip

TEXTS: list[bytes] = [
    b"", b" ", b"{", b"}", b"[", b"]", b'{"model":', b'{"a" 1}', b"{'a': 1}", b'{"a":1,}', b'{"a":1}{"b":2}', b'{"a":1} x', b"null", b"true", b"1",
    b'"x"', b"[]", b"[{}]", b"\xff", b"\xfe\xff\x00{\x00}", b"\xef\xbb\xbf{", b"\x00{}", b'{"a":"\x00"}', b'{"a":"\t"}', b'{"a":"\\x"}', b'{"a":"\\ud800',
    b'{"messages":"\\ud83d"}', b'{"messages":[{"role":"user","content":"\\ud83d"}]}', b'{"prompt":"\\udc00"}', b'{"\\ud83d":1}', b'{"a":NaN}',
    b'{"a":Infinity}', b'{"a":-Infinity}', b'{"a":1e400}', b'{"a":-1e999}', b'{"a":' + b"9" * 5_000 + b"}", b'{"temperature":' + b"1" * 400 + b"}",
    b'{"a":01}', b'{"a":+1}', b'{"a":.5}', b'{"a":1.}', b'{"a":0x1}', b'{"a":1_0}', b"/* */{}", b'{"a":1}//', b'{"model":"a","model":1}',
    b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP + b"1" + b"}" * DEEP, b'{"a":' + b"[" * 70 + b"]" * 70 + b"}", b'{"a":"' + b"x" * 1_000_000,
    b"\x1f\x8b\x08\x00\x00", b"a=b&c=d", b"--x\r\n\r\n--x--", b"<xml/>", b"%PDF", b'{"a":[' + b"1," * 5_000 + b"]}", b'{"model":{}}', b'{"model":1}',
    b'{"model":""}', b'{"model":"' + b"m" * 10_000 + b'"}', b'{"messages":[]}', b'{"messages":{}}', b'{"messages":[1]}', b'{"messages":[null]}',
    b'{"messages":[{}]}', b'{"messages":[{"role":"x"}]}', b'{"messages":"hi"}', b'{"prompt":{}}', b'{"prompt":[]}', b'{"prompt":[[]]}',
    b'{"prompt":[-1]}', b'{"prompt":[99999999999999999999]}', b'{"prompt":[1.5]}', b'{"prompt":[true]}', b'{"input":{}}', b'{"tokens":"x"}',
    b'{"tokens":[-1]}', b'{"tokens":[4294967296]}', b'{"class":7}', b'{"grace_ms":-1}',
]  # fmt: skip
MEMBERS = ["max_tokens", "temperature", "top_p", "top_k", "n", "stop", "seed", "logprobs", "stream", "logit_bias", "tools",
           "response_format", "stream_options", "min_tokens", "user", "presence_penalty", "model"]  # fmt: skip
VALUES = [
    "[]",
    "{}",
    '"x"',
    "-1",
    "1e308",
    "true",
    "9007199254740993",
    '[[["x"]]]',
    '"' + "y" * 3_000 + '"',
]


def _whole(host: bytes, path: str, body: bytes) -> bytes:
    head = b"POST %s HTTP/1.1\r\nhost: %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (path.encode(), host, len(body)) + body


def requests(host: bytes, paths: Sequence[str]) -> Iterator[tuple[str, bytes, bool]]:
    yield from _heads(host)
    yield from _bodies(host, paths)
    yield from _damaged(host, paths[0])


def _heads(host: bytes) -> Iterator[tuple[str, bytes, bool]]:
    named = b"host: " + host + CRLF
    for number, line in enumerate(LINES):
        yield f"line {number}", line + CRLF + named + CRLF, True
    body = b'{"model":"org/m","messages":[]}'
    length = b"content-length: %d\r\n" % len(body)
    for number, header in enumerate(HEADERS):
        own = b"" if header.startswith(b"host") else named
        get = b"GET /v1/models HTTP/1.1\r\n" + own + header + CRLF + CRLF
        yield f"header {number} of GET", get, True
        post = b"POST /v1/chat/completions HTTP/1.1\r\n" + own + header + CRLF + length + CRLF
        yield f"header {number} of POST", post + body, True
    start = b"POST /v1/chat/completions HTTP/1.1\r\n" + named
    for number, framing in enumerate(FRAMINGS):
        yield f"framing {number}", start + framing + CRLF + CRLF + b"{}", False
    for number, chunks in enumerate(CHUNKS):
        yield f"chunks {number}", start + b"transfer-encoding: chunked\r\n\r\n" + chunks, False


def _bodies(host: bytes, paths: Sequence[str]) -> Iterator[tuple[str, bytes, bool]]:
    for number, text in enumerate(TEXTS):
        for path in paths if len(text) < 50_000 else paths[:1]:
            yield f"text {number} to {path}", _whole(host, path, text), True
    for member in MEMBERS:
        for value in VALUES:
            text = b'{"model":"org/m","messages":[{"role":"user","content":"x"}],"max_tokens":1,"%s":%s}'
            body = text % (member.encode(), value.encode())
            yield f"{member}={value[:20]}", _whole(host, paths[0], body), True


def _damaged(host: bytes, path: str) -> Iterator[tuple[str, bytes, bool]]:
    draw = random.Random(11)
    chat = {"model": "org/m", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    good = _whole(host, path, json.dumps(chat).encode())
    for number in range(60):
        data = bytearray(good)
        for _ in range(draw.randrange(1, 5)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        yield f"damaged {number}", bytes(data), False
    for number in range(20):
        yield f"cut {number}", good[: draw.randrange(1, len(good))], False
