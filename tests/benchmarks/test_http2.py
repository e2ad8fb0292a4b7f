"""Frames and headers of the small HTTP/2 client; whole calls are in test_load.py, against grpcio's server."""

import struct

import pytest

from benchmarks.load.http2 import DATA, SETTINGS, WINDOW_UPDATE, Connection, StreamError, frame, literal, trailers_error


class Transport:
    def __init__(self):
        self.data = b""

    def write(self, data):
        self.data += data

    def frames(self, kind):
        """Return the payloads of the frames of one kind written since the last call."""
        data, found = self.data.removeprefix(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), []
        self.data = b""
        while data:
            size = int.from_bytes(data[:3], "big")
            if data[3] == kind:
                found.append(data[9 : 9 + size])
            data = data[9 + size :]
        return found


@pytest.fixture
def connection():
    connection = Connection("localhost")
    connection.connection_made(Transport())
    return connection


def open_stream(connection, messages, ends):
    return connection.open_stream("/service/Method", messages.append, ends.append)


@pytest.mark.parametrize("cut", [1, 5, 9, 12, 14, 16, 20, 23])
def test_messages_are_joined_however_the_bytes_are_cut(connection, cut):
    messages = []
    stream = open_stream(connection, messages, [])
    body = b"\0\0\0\0\5hello\0\0\0\0\2ab"
    data = frame(DATA, 0, stream.number, body[:8]) + frame(DATA, 0, stream.number, body[8:])
    connection.data_received(data[:cut])
    connection.data_received(data[cut:])
    assert messages == [b"hello", b"ab"]


def test_what_is_sent_waits_for_the_windows(connection):
    stream = open_stream(connection, [], [])
    transport = connection._transport
    transport.frames(DATA)
    stream.send(b"x" * 100_000)
    assert sum(map(len, transport.frames(DATA))) == 65535
    connection.data_received(frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", 100_000)))
    assert transport.frames(DATA) == []
    connection.data_received(frame(WINDOW_UPDATE, 0, stream.number, struct.pack(">I", 100_000)))
    assert sum(map(len, transport.frames(DATA))) == 100_005 - 65535


def test_settings_change_the_windows_of_open_streams(connection):
    stream = open_stream(connection, [], [])
    connection.data_received(frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 100_000)))
    assert stream.window == 100_000


def test_a_lost_connection_ends_every_stream(connection):
    ends = []
    open_stream(connection, [], ends)
    open_stream(connection, [], ends)
    connection.connection_lost(None)
    assert [str(end) for end in ends] == ["connection lost", "connection lost"]


def test_trailers_say_what_went_wrong():
    block = b"\x00\x0bgrpc-status\x0214\x00\x0cgrpc-message\x04gone"
    assert str(trailers_error(block)) == "gRPC status 14 gone"
    assert isinstance(trailers_error(block), StreamError)
    assert trailers_error(b"\x00\x0bgrpc-status\x010") is None
    assert literal(b"", b"grpc-status") == ""
