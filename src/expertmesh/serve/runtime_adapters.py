"""Adapters that are loaded and unloaded while the server runs, by vLLM's requests."""

import asyncio
from functools import partial
from pathlib import Path

from expertmesh.errors import CheckpointError, ConfigError
from expertmesh.serve.faults import RequestError
from expertmesh.serve.reading import RequestReader, refuse_unknown
from expertmesh.serve.schema import LoadAdapterRequest, UnloadAdapterRequest
from expertmesh.serve.worker import EngineWorker

_MOST = 64
"""Maximum number of adapters at a time: each takes memory, and a folder may be loaded under many names."""
_LOOK_S = 0.05


class RuntimeAdapters:
    """Adapters below one folder; nothing outside of it is read.

    Args:
        root: the folder; None: nothing is loaded or unloaded.
    """

    def __init__(self, worker: EngineWorker, reader: RequestReader, root: str | None) -> None:
        self._worker, self._reader = worker, reader
        self._root = None if root is None else Path(root).expanduser().resolve()
        self._changing = asyncio.Lock()

    async def load(self, request: LoadAdapterRequest) -> str:
        """Load an adapter; returns what has happened."""
        root = self._check()
        harmless = {"load_inplace": (False,), "is_3d_lora_weight": (False,)}
        refuse_unknown(request.model_extra, harmless=harmless)
        name, folder = request.lora_name, _below(root, request.lora_path)
        async with self._changing:
            known = self._reader.model_names
            if name in known:
                raise _wrong("lora_name", f"{name!r} is loaded already; unload it first")
            if len(known) > _MOST:
                raise _wrong("lora_name", f"there are {_MOST} adapters; unload one first")
            if folder is None:
                raise _wrong("lora_path", "must be a folder below that of --adapter-root")
            engine = self._worker.engine
            try:
                await self._worker.call(partial(engine.load_adapter, name, folder))
            except (ConfigError, CheckpointError) as error:
                raise _wrong("lora_path", str(error)) from None
        return f"Success: LoRA adapter '{name}' added successfully."

    async def unload(self, request: UnloadAdapterRequest) -> str:
        """Unload an adapter once its requests have ended; new ones do not find it. Returns what has happened."""
        self._check()
        refuse_unknown(request.model_extra)
        name = request.lora_name
        if self._reader.adapter_of(name) is None:
            raise _wrong("lora_name", "is the model itself, which cannot be unloaded")
        await asyncio.shield(asyncio.ensure_future(self._unload(name)))
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _unload(self, name: str) -> None:
        self._reader.leaving.add(name)
        try:
            while not await self._worker.call(partial(self._unloaded, name)):
                await asyncio.sleep(_LOOK_S)
        finally:
            self._reader.leaving.discard(name)

    def _unloaded(self, name: str) -> bool:
        """Whether an adapter is unloaded, which it is unless a request has it; in the engine's thread."""
        engine = self._worker.engine
        if engine.num_requests_of(name):
            return False
        engine.unload_adapter(name)
        return True

    def _check(self) -> Path:
        if self._root is None:
            raise RequestError(
                403,
                "adapters are not loaded while the server runs; start it with --adapter-root DIR, below which they are",
            )
        return self._root


def _below(root: Path, given: str) -> Path | None:
    """A folder below another one, links followed; None: there is none."""
    try:
        found = (root / given).resolve()
        return found if found.is_relative_to(root) and found.is_dir() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _wrong(field: str, rule: str) -> RequestError:
    return RequestError(400, f"{field}: {rule}", param=field)
