from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Fingerprint(_message.Message):
    __slots__ = ("model", "tokenizer", "dtype", "block_size", "layout_version", "geometry_json", "protocol_version")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_JSON_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    model: str
    tokenizer: str
    dtype: str
    block_size: int
    layout_version: int
    geometry_json: str
    protocol_version: int
    def __init__(self, model: _Optional[str] = ..., tokenizer: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., layout_version: _Optional[int] = ..., geometry_json: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("worker_id", "role", "epoch", "address", "fingerprint", "node", "pid", "num_blocks", "max_model_len", "model_name", "transport", "draining", "signature", "issued_at", "transport_note", "spare_transports", "hidden_size")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    MODEL_NAME_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_NOTE_FIELD_NUMBER: _ClassVar[int]
    SPARE_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: str
    epoch: str
    address: str
    fingerprint: Fingerprint
    node: str
    pid: int
    num_blocks: int
    max_model_len: int
    model_name: str
    transport: str
    draining: bool
    signature: bytes
    issued_at: float
    transport_note: str
    spare_transports: _containers.RepeatedScalarFieldContainer[str]
    hidden_size: int
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., epoch: _Optional[str] = ..., address: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., num_blocks: _Optional[int] = ..., max_model_len: _Optional[int] = ..., model_name: _Optional[str] = ..., transport: _Optional[str] = ..., draining: _Optional[bool] = ..., signature: _Optional[bytes] = ..., issued_at: _Optional[float] = ..., transport_note: _Optional[str] = ..., spare_transports: _Optional[_Iterable[str]] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "min_p", "penalties", "logit_bias", "logprobs", "prompt_logprobs", "grammar")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    PENALTIES_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    min_p: float
    penalties: Penalties
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    prompt_logprobs: int
    grammar: Grammar
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: _Optional[bool] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., min_p: _Optional[float] = ..., penalties: _Optional[_Union[Penalties, _Mapping]] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ...) -> None: ...

class Penalties(_message.Message):
    __slots__ = ("presence", "frequency", "repetition")
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_FIELD_NUMBER: _ClassVar[int]
    presence: float
    frequency: float
    repetition: float
    def __init__(self, presence: _Optional[float] = ..., frequency: _Optional[float] = ..., repetition: _Optional[float] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Request(_message.Message):
    __slots__ = ("request_id", "attempt", "router_id", "router_epoch", "prompt_ids", "output_ids", "root_digest", "block_names", "sampling", "remaining_ms", "priority", "n", "outputs", "pools")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    ROOT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    router_id: str
    router_epoch: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    root_digest: bytes
    block_names: bytes
    sampling: Sampling
    remaining_ms: int
    priority: int
    n: int
    outputs: _containers.RepeatedCompositeFieldContainer[ChoiceOutputs]
    pools: bool
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., router_id: _Optional[str] = ..., router_epoch: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., root_digest: _Optional[bytes] = ..., block_names: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., remaining_ms: _Optional[int] = ..., priority: _Optional[int] = ..., n: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[ChoiceOutputs, _Mapping]]] = ..., pools: _Optional[bool] = ...) -> None: ...

class ChoiceOutputs(_message.Message):
    __slots__ = ("choice", "token_ids")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Reader(_message.Message):
    __slots__ = ("worker_id", "epoch", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class Source(_message.Message):
    __slots__ = ("worker_id", "epoch", "address", "blocks")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    address: str
    blocks: int
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., address: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class SubmitRequest(_message.Message):
    __slots__ = ("request", "reader", "source", "compute_here")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_HERE_FIELD_NUMBER: _ClassVar[int]
    request: Request
    reader: Reader
    source: Source
    compute_here: bool
    def __init__(self, request: _Optional[_Union[Request, _Mapping]] = ..., reader: _Optional[_Union[Reader, _Mapping]] = ..., source: _Optional[_Union[Source, _Mapping]] = ..., compute_here: _Optional[bool] = ...) -> None: ...

class SubmitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "reason", "choices")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reason: str
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RetargetRequest(_message.Message):
    __slots__ = ("request_id", "attempt", "reader", "remaining_ms")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    READER_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    reader: Reader
    remaining_ms: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reader: _Optional[_Union[Reader, _Mapping]] = ..., remaining_ms: _Optional[int] = ...) -> None: ...

class RetargetReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("router_id", "router_epoch", "last_seq", "protocol_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    router_epoch: str
    last_seq: int
    protocol_version: int
    def __init__(self, router_id: _Optional[str] = ..., router_epoch: _Optional[str] = ..., last_seq: _Optional[int] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message", "retryable")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    retryable: bool
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., retryable: _Optional[bool] = ...) -> None: ...

class StageTimes(_message.Message):
    __slots__ = ("queue_ms", "kv_load_ms", "compute_ms", "transfer_exposed_ms", "wait_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    KV_LOAD_MS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_EXPOSED_MS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    kv_load_ms: float
    compute_ms: float
    transfer_exposed_ms: float
    wait_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., kv_load_ms: _Optional[float] = ..., compute_ms: _Optional[float] = ..., transfer_exposed_ms: _Optional[float] = ..., wait_ms: _Optional[float] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("request_id", "attempt", "position", "token_ids", "finish_reason", "error", "cached_tokens", "times", "choice", "logprobs", "prompt_start", "prompt_logprobs", "pooled")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_START_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: str
    error: Error
    cached_tokens: int
    times: StageTimes
    choice: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    prompt_start: int
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    pooled: bytes
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., times: _Optional[_Union[StageTimes, _Mapping]] = ..., choice: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., prompt_start: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., pooled: _Optional[bytes] = ...) -> None: ...

class TimelineEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "name", "at_ms", "detail_json")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    AT_MS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_JSON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    name: str
    at_ms: float
    detail_json: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., name: _Optional[str] = ..., at_ms: _Optional[float] = ..., detail_json: _Optional[str] = ...) -> None: ...

class HandoffReport(_message.Message):
    __slots__ = ("request_id", "attempt", "state", "error", "bytes", "layers", "transport")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    state: str
    error: Error
    bytes: int
    layers: int
    transport: str
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., state: _Optional[str] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., bytes: _Optional[int] = ..., layers: _Optional[int] = ..., transport: _Optional[str] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("step", "running", "waiting", "waiting_prefill_tokens", "blocks_total", "blocks_free", "blocks_used", "blocks_cached", "blocks_reserved", "blocks_quarantined", "prompt_tokens_computed", "prompt_tokens_cached", "tokens_generated", "prefill_tokens_per_s", "step_ms", "tokens_forwarded", "tokens_recomputed", "stalled", "preemptions", "decode_tokens_forwarded", "kv_unused_tokens", "kv_unwritten_blocks", "output_mispredictions", "admissions_held_back", "pulls", "pulls_failed", "pulled_blocks", "cached_by_source", "loads_failed", "transfer_failures")
    class CachedBySourceEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class TransferFailuresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FREE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RESERVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FORWARDED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FORWARDED_FIELD_NUMBER: _ClassVar[int]
    KV_UNUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_UNWRITTEN_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_MISPREDICTIONS_FIELD_NUMBER: _ClassVar[int]
    ADMISSIONS_HELD_BACK_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    PULLS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PULLED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    LOADS_FAILED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_FAILURES_FIELD_NUMBER: _ClassVar[int]
    step: int
    running: int
    waiting: int
    waiting_prefill_tokens: int
    blocks_total: int
    blocks_free: int
    blocks_used: int
    blocks_cached: int
    blocks_reserved: int
    blocks_quarantined: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    tokens_generated: int
    prefill_tokens_per_s: float
    step_ms: float
    tokens_forwarded: int
    tokens_recomputed: int
    stalled: bool
    preemptions: int
    decode_tokens_forwarded: int
    kv_unused_tokens: int
    kv_unwritten_blocks: int
    output_mispredictions: int
    admissions_held_back: int
    pulls: int
    pulls_failed: int
    pulled_blocks: int
    cached_by_source: _containers.ScalarMap[str, int]
    loads_failed: int
    transfer_failures: _containers.ScalarMap[str, int]
    def __init__(self, step: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_prefill_tokens: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_free: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., blocks_reserved: _Optional[int] = ..., blocks_quarantined: _Optional[int] = ..., prompt_tokens_computed: _Optional[int] = ..., prompt_tokens_cached: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., step_ms: _Optional[float] = ..., tokens_forwarded: _Optional[int] = ..., tokens_recomputed: _Optional[int] = ..., stalled: _Optional[bool] = ..., preemptions: _Optional[int] = ..., decode_tokens_forwarded: _Optional[int] = ..., kv_unused_tokens: _Optional[int] = ..., kv_unwritten_blocks: _Optional[int] = ..., output_mispredictions: _Optional[int] = ..., admissions_held_back: _Optional[int] = ..., pulls: _Optional[int] = ..., pulls_failed: _Optional[int] = ..., pulled_blocks: _Optional[int] = ..., cached_by_source: _Optional[_Mapping[str, int]] = ..., loads_failed: _Optional[int] = ..., transfer_failures: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PullReport(_message.Message):
    __slots__ = ("holder_id", "bytes", "wire_ms")
    HOLDER_ID_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_MS_FIELD_NUMBER: _ClassVar[int]
    holder_id: str
    bytes: int
    wire_ms: float
    def __init__(self, holder_id: _Optional[str] = ..., bytes: _Optional[int] = ..., wire_ms: _Optional[float] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("worker_id", "epoch", "seq", "outputs", "events", "handoffs", "load", "registration", "pulls")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    HANDOFFS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    epoch: str
    seq: int
    outputs: _containers.RepeatedCompositeFieldContainer[Output]
    events: _containers.RepeatedCompositeFieldContainer[TimelineEvent]
    handoffs: _containers.RepeatedCompositeFieldContainer[HandoffReport]
    load: Load
    registration: Registration
    pulls: _containers.RepeatedCompositeFieldContainer[PullReport]
    def __init__(self, worker_id: _Optional[str] = ..., epoch: _Optional[str] = ..., seq: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[Output, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[TimelineEvent, _Mapping]]] = ..., handoffs: _Optional[_Iterable[_Union[HandoffReport, _Mapping]]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., registration: _Optional[_Union[Registration, _Mapping]] = ..., pulls: _Optional[_Iterable[_Union[PullReport, _Mapping]]] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("ticket_id", "request", "writer_id", "writer_epoch", "writer_address", "reader_epoch", "fingerprint", "transport", "segment_request_json", "spare_transports", "last_list")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    WRITER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    READER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_REQUEST_JSON_FIELD_NUMBER: _ClassVar[int]
    SPARE_TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LAST_LIST_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    request: Request
    writer_id: str
    writer_epoch: str
    writer_address: str
    reader_epoch: str
    fingerprint: Fingerprint
    transport: str
    segment_request_json: str
    spare_transports: _containers.RepeatedScalarFieldContainer[str]
    last_list: int
    def __init__(self, ticket_id: _Optional[str] = ..., request: _Optional[_Union[Request, _Mapping]] = ..., writer_id: _Optional[str] = ..., writer_epoch: _Optional[str] = ..., writer_address: _Optional[str] = ..., reader_epoch: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., transport: _Optional[str] = ..., segment_request_json: _Optional[str] = ..., spare_transports: _Optional[_Iterable[str]] = ..., last_list: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("ticket_id", "block_ids", "cached_blocks", "segment", "lease_ms", "geometry_json", "transport")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_JSON_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_blocks: int
    segment: str
    lease_ms: int
    geometry_json: str
    transport: str
    def __init__(self, ticket_id: _Optional[str] = ..., block_ids: _Optional[_Iterable[int]] = ..., cached_blocks: _Optional[int] = ..., segment: _Optional[str] = ..., lease_ms: _Optional[int] = ..., geometry_json: _Optional[str] = ..., transport: _Optional[str] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("layer", "block", "count", "digest")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    layer: int
    block: int
    count: int
    digest: int
    def __init__(self, layer: _Optional[int] = ..., block: _Optional[int] = ..., count: _Optional[int] = ..., digest: _Optional[int] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("choice", "token_id", "logprobs")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_id: int
    logprobs: TokenLogprobs
    def __init__(self, choice: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[TokenLogprobs, _Mapping]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("ticket_id", "request_id", "attempt", "first_tokens", "extents", "cached_tokens", "writer_epoch")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    request_id: str
    attempt: int
    first_tokens: _containers.RepeatedCompositeFieldContainer[FirstToken]
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    cached_tokens: int
    writer_epoch: str
    def __init__(self, ticket_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., first_tokens: _Optional[_Iterable[_Union[FirstToken, _Mapping]]] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., cached_tokens: _Optional[int] = ..., writer_epoch: _Optional[str] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ("state", "bad", "reason")
    STATE_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    state: str
    bad: _containers.RepeatedCompositeFieldContainer[Extent]
    reason: str
    def __init__(self, state: _Optional[str] = ..., bad: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., reason: _Optional[str] = ...) -> None: ...

class CloseTicketRequest(_message.Message):
    __slots__ = ("ticket_id", "request_id", "attempt", "reason", "fenced", "writer_epoch")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FENCED_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    request_id: str
    attempt: int
    reason: str
    fenced: bool
    writer_epoch: str
    def __init__(self, ticket_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., reason: _Optional[str] = ..., fenced: _Optional[bool] = ..., writer_epoch: _Optional[str] = ...) -> None: ...

class CloseTicketReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaseRequest(_message.Message):
    __slots__ = ("writer_id", "writer_epoch", "ticket_ids", "number", "reader_epoch")
    WRITER_ID_FIELD_NUMBER: _ClassVar[int]
    WRITER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    TICKET_IDS_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    READER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    writer_id: str
    writer_epoch: str
    ticket_ids: _containers.RepeatedScalarFieldContainer[str]
    number: int
    reader_epoch: str
    def __init__(self, writer_id: _Optional[str] = ..., writer_epoch: _Optional[str] = ..., ticket_ids: _Optional[_Iterable[str]] = ..., number: _Optional[int] = ..., reader_epoch: _Optional[str] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("reader_epoch", "unknown_ticket_ids")
    READER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    UNKNOWN_TICKET_IDS_FIELD_NUMBER: _ClassVar[int]
    reader_epoch: str
    unknown_ticket_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, reader_epoch: _Optional[str] = ..., unknown_ticket_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("ticket_id", "request_id", "attempt", "router_id", "router_epoch", "reader_id", "reader_epoch", "reader_address", "holder_epoch", "fingerprint", "transport", "block_names", "first", "block_ids", "segment", "geometry_json", "remaining_ms", "resend")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    READER_ID_FIELD_NUMBER: _ClassVar[int]
    READER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    READER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_NAMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_JSON_FIELD_NUMBER: _ClassVar[int]
    REMAINING_MS_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    request_id: str
    attempt: int
    router_id: str
    router_epoch: str
    reader_id: str
    reader_epoch: str
    reader_address: str
    holder_epoch: str
    fingerprint: Fingerprint
    transport: str
    block_names: bytes
    first: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    segment: str
    geometry_json: str
    remaining_ms: int
    resend: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, ticket_id: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., router_id: _Optional[str] = ..., router_epoch: _Optional[str] = ..., reader_id: _Optional[str] = ..., reader_epoch: _Optional[str] = ..., reader_address: _Optional[str] = ..., holder_epoch: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., transport: _Optional[str] = ..., block_names: _Optional[bytes] = ..., first: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., segment: _Optional[str] = ..., geometry_json: _Optional[str] = ..., remaining_ms: _Optional[int] = ..., resend: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class PullReply(_message.Message):
    __slots__ = ("count", "extents", "bytes", "wire_ms")
    COUNT_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    WIRE_MS_FIELD_NUMBER: _ClassVar[int]
    count: int
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    bytes: int
    wire_ms: float
    def __init__(self, count: _Optional[int] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., bytes: _Optional[int] = ..., wire_ms: _Optional[float] = ...) -> None: ...

class EndPullRequest(_message.Message):
    __slots__ = ("ticket_id", "reason", "holder_epoch")
    TICKET_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    HOLDER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    ticket_id: str
    reason: str
    holder_epoch: str
    def __init__(self, ticket_id: _Optional[str] = ..., reason: _Optional[str] = ..., holder_epoch: _Optional[str] = ...) -> None: ...

class EndPullReply(_message.Message):
    __slots__ = ("fenced",)
    FENCED_FIELD_NUMBER: _ClassVar[int]
    fenced: bool
    def __init__(self, fenced: _Optional[bool] = ...) -> None: ...

class StepsRequest(_message.Message):
    __slots__ = ("last",)
    LAST_FIELD_NUMBER: _ClassVar[int]
    last: int
    def __init__(self, last: _Optional[int] = ...) -> None: ...

class StepsReply(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
