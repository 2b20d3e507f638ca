from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListExecutorsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class Executor(_message.Message):
    __slots__ = ("name", "session", "model", "status", "device", "steps", "round_us", "oldest_step_age", "unanswered_steps", "slots_used", "slots_total", "blocks_total", "blocks_free", "blocks_cached", "blocks_owned", "prefix_hits", "prefix_lookups")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    ROUND_US_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_AGE_FIELD_NUMBER: _ClassVar[int]
    UNANSWERED_STEPS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_OWNED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    session: str
    model: str
    status: str
    device: str
    steps: int
    round_us: int
    oldest_step_age: float
    unanswered_steps: int
    slots_used: int
    slots_total: int
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_owned: int
    prefix_hits: int
    prefix_lookups: int
    def __init__(self, name: _Optional[str] = ..., session: _Optional[str] = ..., model: _Optional[str] = ..., status: _Optional[str] = ..., device: _Optional[str] = ..., steps: _Optional[int] = ..., round_us: _Optional[int] = ..., oldest_step_age: _Optional[float] = ..., unanswered_steps: _Optional[int] = ..., slots_used: _Optional[int] = ..., slots_total: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_owned: _Optional[int] = ..., prefix_hits: _Optional[int] = ..., prefix_lookups: _Optional[int] = ...) -> None: ...

class ListExecutorsResponse(_message.Message):
    __slots__ = ("executors",)
    EXECUTORS_FIELD_NUMBER: _ClassVar[int]
    executors: _containers.RepeatedCompositeFieldContainer[Executor]
    def __init__(self, executors: _Optional[_Iterable[_Union[Executor, _Mapping]]] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelLoad(_message.Message):
    __slots__ = ("name", "executors_ready", "executors_expected", "running", "waiting", "live_requests")
    NAME_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_READY_FIELD_NUMBER: _ClassVar[int]
    EXECUTORS_EXPECTED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    LIVE_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    executors_ready: int
    executors_expected: int
    running: int
    waiting: int
    live_requests: int
    def __init__(self, name: _Optional[str] = ..., executors_ready: _Optional[int] = ..., executors_expected: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., live_requests: _Optional[int] = ...) -> None: ...

class TenantLoad(_message.Message):
    __slots__ = ("name", "requests", "queued_tokens", "token_credit", "max_requests", "max_queued_tokens", "tokens_per_second")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_CREDIT_FIELD_NUMBER: _ClassVar[int]
    MAX_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    name: str
    requests: int
    queued_tokens: int
    token_credit: float
    max_requests: int
    max_queued_tokens: int
    tokens_per_second: float
    def __init__(self, name: _Optional[str] = ..., requests: _Optional[int] = ..., queued_tokens: _Optional[int] = ..., token_credit: _Optional[float] = ..., max_requests: _Optional[int] = ..., max_queued_tokens: _Optional[int] = ..., tokens_per_second: _Optional[float] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("uptime", "models", "tenants", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    UPTIME_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    uptime: float
    models: _containers.RepeatedCompositeFieldContainer[ModelLoad]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantLoad]
    counters: _containers.ScalarMap[str, int]
    def __init__(self, uptime: _Optional[float] = ..., models: _Optional[_Iterable[_Union[ModelLoad, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantLoad, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class DrainExecutorRequest(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: str
    def __init__(self, executor: _Optional[str] = ...) -> None: ...

class DrainExecutorResponse(_message.Message):
    __slots__ = ("status",)
    STATUS_FIELD_NUMBER: _ClassVar[int]
    status: str
    def __init__(self, status: _Optional[str] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("executor",)
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    executor: str
    def __init__(self, executor: _Optional[str] = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class ExplainRequestRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Overtaker(_message.Message):
    __slots__ = ("request_id", "tenant", "seconds_ago", "rule")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_AGO_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    tenant: str
    seconds_ago: float
    rule: str
    def __init__(self, request_id: _Optional[str] = ..., tenant: _Optional[str] = ..., seconds_ago: _Optional[float] = ..., rule: _Optional[str] = ...) -> None: ...

class ChoiceState(_message.Message):
    __slots__ = ("index", "state", "waits_for", "outputs", "preemptions", "deaths", "executor", "ahead", "waiting_seconds", "passed", "passed_by")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WAITS_FOR_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DEATHS_FIELD_NUMBER: _ClassVar[int]
    EXECUTOR_FIELD_NUMBER: _ClassVar[int]
    AHEAD_FIELD_NUMBER: _ClassVar[int]
    WAITING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    PASSED_BY_FIELD_NUMBER: _ClassVar[int]
    index: int
    state: str
    waits_for: str
    outputs: int
    preemptions: int
    deaths: int
    executor: str
    ahead: int
    waiting_seconds: float
    passed: int
    passed_by: _containers.RepeatedCompositeFieldContainer[Overtaker]
    def __init__(self, index: _Optional[int] = ..., state: _Optional[str] = ..., waits_for: _Optional[str] = ..., outputs: _Optional[int] = ..., preemptions: _Optional[int] = ..., deaths: _Optional[int] = ..., executor: _Optional[str] = ..., ahead: _Optional[int] = ..., waiting_seconds: _Optional[float] = ..., passed: _Optional[int] = ..., passed_by: _Optional[_Iterable[_Union[Overtaker, _Mapping]]] = ...) -> None: ...

class ExplainRequestResponse(_message.Message):
    __slots__ = ("request_id", "model", "tenant", "priority", "age", "reason", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    AGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    tenant: str
    priority: int
    age: float
    reason: str
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceState]
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., age: _Optional[float] = ..., reason: _Optional[str] = ..., choices: _Optional[_Iterable[_Union[ChoiceState, _Mapping]]] = ...) -> None: ...
