"""Inside a sandbox: run a program while connections to a port of the loopback go on to a socket file.

`entry.py PORT SOCKET KEEP -- WORDS...`, with any python3 and nothing installed. Prints the last KEEP bytes of what the
program said; its exit code is the program's, 128 + N after signal N, 127 when it cannot be started.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass on what comes until no more does."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def main(port: int, path: str, keep: int, words: list[str]) -> int:
    """The exit code."""

    async def joined(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            inner_reader, inner_writer = await asyncio.open_unix_connection(path)
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
            inner_writer.close()
        writer.close()

    server = await asyncio.start_server(joined, "127.0.0.1", port)
    try:
        program = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
    except OSError as error:
        print(f"{words[0]}: {error}")
        return 127
    assert program.stdout is not None
    said = bytearray()

    async def listen(output: asyncio.StreamReader) -> None:
        while data := await output.read(65_536):
            said.extend(data)
            del said[: max(0, len(said) - keep)]

    listening = asyncio.ensure_future(listen(program.stdout))
    code = await program.wait()
    # what it left running may hold its output open, and nobody waits for that
    await asyncio.wait({listening}, timeout=0.2)
    listening.cancel()
    server.close()
    sys.stdout.buffer.write(said)
    sys.stdout.flush()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[5:])))
