"""StepLayout in one compiled call."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_int32, c_void_p

from workers.layout import (
    BUFFERS,
    FIELDS,
    LaidOut,
    RowFields,
    RowMisfit,
    StepBuffers,
    TooManyTokens,
)
from workers.native.bindings import load_library
from workers.sequences import SequenceTable

_TOO_MANY_TOKENS = -2

_OF_SEQUENCES = ("token_ids", "blocks", "lengths", "num_blocks", "ended")


class LayoutView(ctypes.Structure):
    """Layout of layout.cpp: arrays of SequenceTable, then those of StepBuffers."""

    _fields_ = [  # ctypes reads it as it is
        *((f"sequence_{name}", c_void_p) for name in _OF_SEQUENCES),
        *((name, c_void_p) for name in BUFFERS),
        ("token_stride", c_int32),
        ("table_stride", c_int32),
        ("block_size", c_int32),
        ("most_tokens", c_int32),
    ]


class LaidOutView(ctypes.Structure):
    """LaidOut of layout.cpp."""

    _fields_ = [(name, c_int32) for name in LaidOut._fields]


class NativeLayout:
    """See StepLayout."""

    def __init__(self, table: SequenceTable, buffers: StepBuffers) -> None:
        """Raises BuildError where nothing can be compiled."""
        function = load_library().headway_lay_out
        function.argtypes = [
            POINTER(LayoutView),
            c_void_p,
            c_int32,
            c_int32,
            POINTER(LaidOutView),
        ]
        function.restype = c_int32
        self._lay_out = function
        # Held, because the views hold addresses only.
        self._table, self._buffers = table, buffers
        self._views = [self._view(turn) for turn in range(len(buffers.token_ids.arrays))]
        self._result = LaidOutView()

    def write(self, fields: RowFields, all_pages: int) -> LaidOut:
        address, length = fields.buffer_info()
        result = self._result
        outcome = self._lay_out(
            self._views[self._buffers.turn],
            address,
            length // FIELDS,
            all_pages,
            byref(result),
        )
        if outcome >= 0:
            raise RowMisfit(outcome)
        if outcome == _TOO_MANY_TOKENS:
            raise TooManyTokens(result.num_tokens)
        return LaidOut(
            result.num_tokens,
            result.num_decodes,
            result.num_sampled,
            result.max_q,
            result.max_k,
            bool(result.unread),
        )

    def _view(self, turn: int) -> LayoutView:
        table, buffers = self._table, self._buffers
        view = LayoutView(
            token_stride=table.token_ids.shape[1],
            table_stride=table.blocks.shape[1],
            block_size=table.block_size,
            most_tokens=len(buffers.token_ids.array),
        )
        for name in _OF_SEQUENCES:
            setattr(view, f"sequence_{name}", getattr(table, name).ctypes.data)
        for name in BUFFERS:
            setattr(view, name, getattr(buffers, name).arrays[turn].ctypes.data)
        return view
