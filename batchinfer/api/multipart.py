"""A multipart form with one file, read as it arrives: memory stays at one chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.concurrency import run_in_threadpool

from batchinfer.errors import InvalidSpecError, TooLargeError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

MAX_FIELD_BYTES = 4096
MAX_FIELDS = 16


class FileSink(Protocol):
    """Takes the file's bytes."""

    def write(self, data: bytes) -> None:
        """Append a chunk."""


class FormReader:
    """Reads a form: text fields are kept, the bytes of the part named ``file`` go to what ``open_file(name)`` gives."""

    def __init__(self, content_type: str | None, open_file: Callable[[str], FileSink]) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidSpecError(
                "send the file as multipart/form-data with a boundary, as curl -F does", param="file"
            )
        self.fields: dict[str, str] = {}
        self._open_file = open_file
        self._sink: FileSink | None = None
        self._has_ended = False
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._header_name.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._header_value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_data,
                "on_part_data": self._take_data,
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )
        self._begin_part()

    async def read(self, chunks: AsyncIterator[bytes]) -> None:
        """Read the whole form. The file's bytes are written by a thread, so that a slow disk holds up nobody else.

        Raises:
            InvalidSpecError: it is no form, or has no file.
            UserError: what the sink raises.
        """
        async for chunk in chunks:
            if chunk:
                await run_in_threadpool(self._feed, chunk)
        if not self._has_ended:
            raise InvalidSpecError("the form ends before its last boundary", code="invalid_form")
        if self._sink is None:
            raise InvalidSpecError("the form has no part named 'file'", param="file", code="missing_file")

    def _feed(self, chunk: bytes) -> None:
        try:
            self._parser.write(chunk)
        except MultipartParseError as error:
            raise InvalidSpecError(f"the form cannot be read: {error}", code="invalid_form") from None

    # -- what the parser calls ----------------------------------------------------------------------------------------
    def _begin_part(self) -> None:
        self._name = ""
        self._value = bytearray()
        self._is_file = False
        self._disposition = b""
        self._header_name, self._header_value = bytearray(), bytearray()

    def _end_header(self) -> None:
        if bytes(self._header_name).lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header_name, self._header_value = bytearray(), bytearray()

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == "file"
        if self._is_file:
            if self._sink is not None:
                raise InvalidSpecError("the form has more than one part named 'file'", param="file")
            self._sink = self._open_file(options.get(b"filename", b"file").decode(errors="replace"))

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            assert self._sink is not None
            self._sink.write(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > MAX_FIELD_BYTES:
            raise TooLargeError(
                f"field {self._name[:40]!r} is longer than {MAX_FIELD_BYTES} bytes", param=self._name[:40]
            )

    def _end_part(self) -> None:
        if self._is_file:
            return
        if len(self.fields) >= MAX_FIELDS:
            raise TooLargeError(f"the form has more than {MAX_FIELDS} fields")
        self.fields[self._name] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self._has_ended = True
