// The C interface of the kernels; services/engine/native/library.py is its other side. Sizes are checked there.
#include "model.h"

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using pdray::bf16;

namespace {

struct Handle {
  std::unique_ptr<pdray::Model<bf16>> half;
  std::unique_ptr<pdray::Model<float>> full;
};

template <class E>
void pack(const E* from, int outputs, int inputs, const int32_t* order, E* to) {
  const int steps = inputs / pdray::STEP, columns = (outputs + 31) / 32 * 2;
  constexpr bool pairs = sizeof(E) == 2;
  for (int column = 0; column < columns; ++column)
    for (int s = 0; s < steps; ++s) {
      E* tile = to + (size_t(column / 2) * steps * 2 + size_t(s) * 2 + column % 2) * pdray::TILE;
      for (int k = 0; k < pdray::STEP; ++k)
        for (int n = 0; n < pdray::WIDE; ++n) {
          int row = column * pdray::WIDE + n;
          size_t at = pairs ? size_t(k / 2) * 32 + size_t(n) * 2 + k % 2 : size_t(k) * 16 + n;
          tile[at] = row < outputs ? from[size_t(order ? order[row] : row) * inputs + s * pdray::STEP + k] : E{};
        }
    }
}

template <class E>
void attend(const pdray::Paged& paged, const void* layer, const std::vector<pdray::Span>& spans, const void* queries,
            void* out, int threads) {
  thread_local std::unique_ptr<pdray::Team> team;
  thread_local std::vector<pdray::Buffer> buffers;
  if (!team || team->size() != threads) {
    team = std::make_unique<pdray::Team>(threads);
    buffers = std::vector<pdray::Buffer>(team->size());
  }
  std::vector<pdray::Buffer>& own = buffers;
  const size_t stride = size_t(paged.kv_heads) * paged.group * paged.head_dim;
  std::atomic<int> next{0};
  team->run([&](int number) {
    pdray::begin_tiles();
    pdray::Workspace<E> workspace(paged, own[number].get<char>(pdray::Workspace<E>::bytes(paged)));
    pdray::attend<E>(paged, static_cast<const E*>(layer), spans, static_cast<const E*>(queries), workspace, next,
                     [&](int row, int item, pdray::Floats v) { pdray::store16(static_cast<E*>(out) + row * stride + item, v); });
    pdray::end_tiles();
  });
}

}  // namespace

extern "C" {

// 0 where this process may use what the library was built for.
int pdray_begin() {
#if defined(__AMX_BF16__)
  constexpr int request_permission = 0x1023, tile_data = 18;  // arch_prctl(2), ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, request_permission, tile_data) ? 1 : 0;
#else
  return 0;
#endif
}

// Args: from: [outputs][inputs]; order: which of its rows each output takes, or null; to: whole panels.
void pdray_pack(int item_bytes, const void* from, int outputs, int inputs, const int32_t* order, void* to) {
  if (item_bytes == 2)
    pack(static_cast<const bf16*>(from), outputs, inputs, order, static_cast<bf16*>(to));
  else
    pack(static_cast<const float*>(from), outputs, inputs, order, static_cast<float*>(to));
}

// With `pinned` the caller, who must be the one that runs the model, and the other threads stay on CPUs of their own.
void* pdray_open(int item_bytes, const pdray::ModelParts* parts, int threads, int pinned) {
  auto handle = std::make_unique<Handle>();
  if (item_bytes == 2)
    handle->half = std::make_unique<pdray::Model<bf16>>(*parts, threads, pinned);
  else
    handle->full = std::make_unique<pdray::Model<float>>(*parts, threads, pinned);
  return handle.release();
}

void pdray_close(void* handle) { delete static_cast<Handle*>(handle); }

int pdray_run(void* handle, const pdray::StepParts* step) {
  auto* own = static_cast<Handle*>(handle);
  return own->half ? own->half->run(*step) : own->full->run(*step);
}

// Bytes of activations and workspaces that the model holds now.
size_t pdray_bytes(void* handle) {
  auto* own = static_cast<Handle*>(handle);
  return own->half ? own->half->bytes() : own->full->bytes();
}

// Attention alone, of one layer. Args: queries, out: [tokens][kv_heads * group][head_dim]; span, blocks as in StepParts.
void pdray_attend(int item_bytes, const void* layer, int kv_heads, int group, int head_dim, int block_size, float scale,
                  int window, int num_spans, const int32_t* span, const int32_t* const* blocks, const void* queries,
                  void* out, int threads) {
  pdray::Paged paged{kv_heads, group, head_dim, block_size, scale * pdray::LOG2E, window};
  std::vector<pdray::Span> spans;
  for (int i = 0; i < num_spans; ++i) spans.push_back({span[3 * i], span[3 * i + 1], span[3 * i + 2], blocks[i]});
  if (item_bytes == 2)
    attend<bf16>(paged, layer, spans, queries, out, threads);
  else
    attend<float>(paged, layer, spans, queries, out, threads);
}

// Bytes of one thread's workspace for attention.
size_t pdray_attention_bytes(int item_bytes, int kv_heads, int group, int head_dim, int block_size) {
  pdray::Paged paged{kv_heads, group, head_dim, block_size, 1.0f, 0};
  return item_bytes == 2 ? pdray::Workspace<bf16>::bytes(paged) : pdray::Workspace<float>::bytes(paged);
}
}
