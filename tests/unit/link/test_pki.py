"""An operator's own authority: what is refused at start by flag and file, and what the links do with the files."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from superfluid_core.errors import ConfigError
from superfluid_core.link import tls
from superfluid_core.link.keys import FleetKeys
from superfluid_core.link.pki import identity_in, pki_files
from superfluid_core.wire.schema import Role
from tests.unit.link.knocks import Refusals, cause_of

PEM = Encoding.PEM


def issue(
    folder: Path, keys: FleetKeys, role: Role, identity: str = "box-1", **changes: Any
) -> tls.PkiFiles:
    """Write what an authority would issue; `changes` make it wrong: names, end, without (an extension)."""
    folder.mkdir(exist_ok=True)
    key = Ed25519PrivateKey.generate()
    leaf = tls.leaf_certificate(keys, role, identity, key)
    builder = x509.CertificateBuilder().subject_name(leaf.subject).issuer_name(leaf.issuer)
    builder = builder.public_key(leaf.public_key()).serial_number(leaf.serial_number)
    builder = builder.not_valid_before(leaf.not_valid_before_utc)
    builder = builder.not_valid_after(changes.get("end", leaf.not_valid_after_utc))
    for extension in leaf.extensions:
        value = extension.value
        if isinstance(value, changes.get("without", ())):
            continue
        if isinstance(value, x509.SubjectAlternativeName) and "names" in changes:
            value = x509.SubjectAlternativeName(changes["names"])
        builder = builder.add_extension(value, extension.critical)
    leaf = builder.sign(keys.authorities[0].signer, None)
    secret = key.private_bytes(PEM, PrivateFormat.PKCS8, NoEncryption())
    for name, data in (
        ("ca.pem", keys.authorities[0].certificate.public_bytes(PEM)),
        ("leaf.pem", leaf.public_bytes(PEM)),
        ("leaf.key", secret),
    ):
        (folder / name).write_bytes(data)
        (folder / name).chmod(0o600)
    return tls.PkiFiles(*(str(folder / name) for name in ("ca.pem", "leaf.pem", "leaf.key")))


def uri(text: str) -> x509.UniformResourceIdentifier:
    return x509.UniformResourceIdentifier(text)


@pytest.mark.parametrize("role", [Role.NODE, Role.HEAD])
def test_a_process_is_called_what_its_certificate_says(
    role: Role, keys: FleetKeys, tmp_path: Path
) -> None:
    assert identity_in(issue(tmp_path / "a", keys, role, "box-7"), role) == "box-7"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"without": x509.SubjectAlternativeName}, "it has no name; it needs superfluid://node/"),
        ({"without": x509.ExtendedKeyUsage}, "it has no extended key usage; it needs serverAuth"),
        ({"names": [uri("superfluid://node/a"), uri("superfluid://node/b")]}, "exactly one name"),
        (
            {"names": [x509.DNSName("box-1.example")]},
            "exactly one name, the URI superfluid://node/",
        ),
        ({"names": [uri("superfluid://head/a")]}, "its name is 'superfluid://head/a'"),
        ({"names": [uri("superfluid://node/a/b")]}, "the identity 'a/b' is not"),
    ],
)
def test_a_wrong_certificate_is_refused_at_start_by_name(
    changes: dict[str, Any], words: str, keys: FleetKeys, tmp_path: Path
) -> None:
    files = issue(tmp_path / "a", keys, Role.NODE, **changes)
    with pytest.raises(ConfigError, match="--fleet-cert ") as caught:
        identity_in(files, Role.NODE)
    assert words in caught.value.message
    assert files.certificate in caught.value.message


def test_the_other_roles_certificate_and_unusable_files_are_refused_by_flag(
    keys: FleetKeys, other_keys: FleetKeys, tmp_path: Path
) -> None:
    def refused(files: tls.PkiFiles, words: str) -> None:
        with pytest.raises(ConfigError) as caught:
            tls.server_context(files, identity_in(files, Role.NODE))
        assert words in caught.value.message

    head = issue(tmp_path / "head", keys, Role.HEAD)
    refused(head, "its extended key usage lacks serverAuth: it is no node's")
    good = issue(tmp_path / "a", keys, Role.NODE)
    other = issue(tmp_path / "b", other_keys, Role.NODE)
    refused(tls.PkiFiles(good.ca, good.certificate, other.key), "KEY_VALUES_MISMATCH")
    refused(tls.PkiFiles(good.ca + "x", good.certificate, good.key), "--fleet-ca ")
    refused(tls.PkiFiles(good.ca, good.certificate + "x", good.key), "--fleet-cert ")
    refused(tls.PkiFiles(good.ca, good.certificate, good.key + "x"), "--fleet-cert-key ")
    refused(tls.PkiFiles(good.ca, good.key, good.key), "no PEM certificate in it")
    refused(tls.PkiFiles(good.ca, good.certificate, str(tmp_path)), "not a regular file")
    Path(good.key).chmod(0o644)
    refused(good, "open to everybody (mode 0644)")


def test_all_three_files_are_given_or_none() -> None:
    assert pki_files(None, None, None) is None
    assert pki_files("a", "b", "c") == tls.PkiFiles("a", "b", "c")
    for given, missing in (
        (("a", None, None), "--fleet-cert "),
        (("a", "b", None), "--fleet-cert-key "),
        ((None, "b", "c"), "--fleet-ca "),
    ):
        with pytest.raises(ConfigError, match=f"^{missing}is missing"):
            pki_files(*given)


def test_handshakes_under_an_own_authority_are_refused_by_name(
    keys: FleetKeys, other_keys: FleetKeys, make_fleet: Any, tmp_path: Path, refusals: Refusals
) -> None:
    expired = {"end": datetime(2001, 1, 1, tzinfo=UTC)}
    cases: list[tuple[FleetKeys, Role, dict[str, Any], str]] = [
        (keys, Role.HEAD, expired, "its certificate has expired"),
        (keys, Role.NODE, {}, "its certificate is not that of a head"),
        (keys, Role.HEAD, {"names": [uri("superfluid://head/x"), uri("superfluid://head/y")]},
         "the peer's certificate has not exactly one name"),
    ]  # fmt: skip

    async def main() -> None:
        node = issue(tmp_path / "node", keys, Role.NODE, "node-1")
        async with make_fleet(node).serving() as fleet:
            link = await fleet.dial(issue(tmp_path / "head", keys, Role.HEAD, "head-1"))
            assert (link.identity, link.is_open) == ("node-1", True)
            await link.close("done")
            error = await cause_of(fleet, issue(tmp_path / "o", other_keys, Role.HEAD, "head-1"))
            assert (
                error.cause
                == "refused at the handshake: it trusts another key (ours: key own authority)"
            )
            assert len(fleet.links) == 1
        for number, (signer, role, changes, words) in enumerate(cases):
            files = issue(tmp_path / str(number), signer, role, "head-1", **changes)
            async with make_fleet(node).serving() as fleet:  # its log has a gate of its own
                await cause_of(fleet, files)
                assert refusals()[-1] == words

    asyncio.run(main())
