"""Decides the bytes of two container images; no registry is asked for any.

`pause` holds one program. `host` holds empty folders: a pod mounts the machine's own `/usr`, and
what else it needs, over them (see `pods`).
"""

import gzip
import hashlib
import io
import json
import platform
import tarfile
from collections.abc import Iterable
from pathlib import Path

PAUSE = "isobatch.test/pause:1"
HOST = "isobatch.test/host:1"
USER_ID = 65532  # "nonroot", as in distroless images
FOLDERS = ("app", "dev", "etc", "home", "opt", "proc", "root", "run", "sys", "tmp", "usr", "var")
MERGED = ("bin", "lib", "lib64", "sbin")
PASSWD = f"root:x:0:0::/root:/bin/sh\nnonroot:x:{USER_ID}:{USER_ID}::/tmp:/bin/sh\n"
GROUP = f"root:x:0:\nnonroot:x:{USER_ID}:\n"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def _file(name: str, content: bytes, mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    return entry, content


def _folder(name: str, mode: int = 0o755) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.type, entry.mode = tarfile.DIRTYPE, mode
    return entry, b""


def _link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return entry, b""


def _tar(entries: Iterable[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for entry, content in entries:
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def _image(name: str, layer: bytes, config: dict[str, object]) -> bytes:
    """An OCI layout of one layer, as `ctr images import` reads it."""
    blobs: dict[str, bytes] = {}

    def described(kind: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[f"blobs/sha256/{digest}"] = content
        media = f"application/vnd.oci.image.{kind}"
        return {"mediaType": media, "digest": f"sha256:{digest}", "size": len(content)}

    settings = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "config": config,
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
    }
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": described("config.v1+json", json.dumps(settings).encode()),
        "layers": [described("layer.v1.tar+gzip", gzip.compress(layer, mtime=0))],
    }
    index = described("manifest.v1+json", json.dumps(manifest).encode())
    index["annotations"] = {"io.containerd.image.name": name}
    files = {
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
        "index.json": json.dumps({"schemaVersion": 2, "manifests": [index]}).encode(),
    }
    return _tar(_file(path, content) for path, content in (files | blobs).items())


def pause_image(program: Path) -> bytes:
    """The image whose one process keeps a pod's namespaces."""
    layer = _tar([_file("pause", program.read_bytes(), 0o755)])
    return _image(PAUSE, layer, {"Entrypoint": ["/pause"], "User": str(USER_ID)})


def host_image() -> bytes:
    """The image of empty folders, with the links of a merged `/usr`."""
    layer = _tar(
        [
            *(_folder(name, 0o1777 if name == "tmp" else 0o755) for name in FOLDERS),
            *(_link(name, f"usr/{name}") for name in MERGED),
            _file("etc/passwd", PASSWD.encode()),
            _file("etc/group", GROUP.encode()),
        ]
    )
    return _image(HOST, layer, {"User": str(USER_ID), "WorkingDir": "/tmp"})
