"""uvicorn's WebSocket protocol with endings that reach the client, and without content in its debug log."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

LINGER_SECONDS = 5.0


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """Three differences, all about how a connection ends.

    - After a frame that breaks the rules (too large, bad UTF-8) the peer's remaining bytes are read and dropped:
      closing with unread bytes makes TCP send a reset, which destroys the close frame on its way.
    - A close is written behind the unsent output of a client that does not read, not after waiting for it.
    - A client that does not finish the closing handshake, or answers no pings, is cut off after a while even if
      bytes for it are still buffered.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn.debug = False  # its debug lines have headers (keys) and frames (prompts)

    async def send(self, message: Any) -> None:
        closing = message["type"] == "websocket.close" and self.handshake_complete
        if closing:
            self.writable.set()
        await super().send(message)
        if closing:
            self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.loop.call_later(LINGER_SECONDS, self.transport.abort)

    def handle_parser_exception(self) -> None:
        if self.close_sent:
            return
        closed = self.conn.close_sent
        if closed is None:  # not even a WebSocket handshake
            self.close_sent = True
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
            return
        self.queue.put_nowait({"type": "websocket.disconnect", "code": closed.code, "reason": closed.reason})
        self.transport.write(b"".join(self.conn.data_to_send()))
        self.close_sent = True
        self.stop_keepalive()
        if self.read_paused:
            self.read_paused = False
            self.transport.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.close_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
