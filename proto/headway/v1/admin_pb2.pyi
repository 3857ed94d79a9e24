from headway.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DrainEngineRequest(_message.Message):
    __slots__ = ("engine_id", "undo", "move")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    undo: bool
    move: bool
    def __init__(self, engine_id: _Optional[str] = ..., undo: bool = ..., move: bool = ...) -> None: ...

class DrainEngineResponse(_message.Message):
    __slots__ = ("remaining",)
    REMAINING_FIELD_NUMBER: _ClassVar[int]
    remaining: int
    def __init__(self, remaining: _Optional[int] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("router", "model", "engines", "peers")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    router: RouterStatus
    model: _inference_pb2.Model
    engines: _containers.RepeatedCompositeFieldContainer[EngineStatus]
    peers: _containers.RepeatedCompositeFieldContainer[RouterStatus]
    def __init__(self, router: _Optional[_Union[RouterStatus, _Mapping]] = ..., model: _Optional[_Union[_inference_pb2.Model, _Mapping]] = ..., engines: _Optional[_Iterable[_Union[EngineStatus, _Mapping]]] = ..., peers: _Optional[_Iterable[_Union[RouterStatus, _Mapping]]] = ...) -> None: ...

class RouterStatus(_message.Message):
    __slots__ = ("version", "uptime_s", "active_streams", "ready", "queued", "queued_tokens", "relief_moves", "router_id", "metrics", "tails")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_STREAMS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RELIEF_MOVES_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    TAILS_FIELD_NUMBER: _ClassVar[int]
    version: str
    uptime_s: float
    active_streams: int
    ready: bool
    queued: int
    queued_tokens: int
    relief_moves: int
    router_id: str
    metrics: str
    tails: _containers.RepeatedCompositeFieldContainer[Tail]
    def __init__(self, version: _Optional[str] = ..., uptime_s: _Optional[float] = ..., active_streams: _Optional[int] = ..., ready: bool = ..., queued: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., relief_moves: _Optional[int] = ..., router_id: _Optional[str] = ..., metrics: _Optional[str] = ..., tails: _Optional[_Iterable[_Union[Tail, _Mapping]]] = ...) -> None: ...

class Tail(_message.Message):
    __slots__ = ("name", "observations", "p50_s", "p99_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    P50_S_FIELD_NUMBER: _ClassVar[int]
    P99_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    observations: int
    p50_s: float
    p99_s: float
    def __init__(self, name: _Optional[str] = ..., observations: _Optional[int] = ..., p50_s: _Optional[float] = ..., p99_s: _Optional[float] = ...) -> None: ...

class EngineStatus(_message.Message):
    __slots__ = ("engine_id", "address", "epoch", "connected", "blocks_total", "blocks_free", "running", "waiting", "step", "tokens_per_s", "preemptions", "frame_age_s", "draining", "step_s", "recomputed_tokens", "metrics")
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONNECTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    FRAME_AGE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    engine_id: str
    address: str
    epoch: int
    connected: bool
    blocks_total: int
    blocks_free: int
    running: int
    waiting: int
    step: int
    tokens_per_s: float
    preemptions: int
    frame_age_s: float
    draining: bool
    step_s: float
    recomputed_tokens: int
    metrics: str
    def __init__(self, engine_id: _Optional[str] = ..., address: _Optional[str] = ..., epoch: _Optional[int] = ..., connected: bool = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., step: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., preemptions: _Optional[int] = ..., frame_age_s: _Optional[float] = ..., draining: bool = ..., step_s: _Optional[float] = ..., recomputed_tokens: _Optional[int] = ..., metrics: _Optional[str] = ...) -> None: ...
