// Element types, 16-byte vectors, and every inline-assembly instruction of the project, each as one small function.
// Needs no NVIDIA header: bf16 and f16 are 16-bit patterns here, converted by the instructions below.
#pragma once

typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef long long int64_t;

#define DEV __device__ __forceinline__

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };
using f32 = float;

constexpr uint32_t ALL_LANES = 0xffffffffu;
constexpr int WARP = 32;
constexpr float LOG2_E = 1.44269504f;
DEV float negative_infinity() { return __uint_as_float(0xff800000u); }

// ---- conversions ----------------------------------------------------------------------------------------------------

DEV float to_float(float x) { return x; }
DEV float to_float(bf16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
DEV float to_float(f16 x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <class T> DEV T from_float(float x);
template <> DEV float from_float<float>(float x) { return x; }
template <> DEV bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <> DEV f16 from_float<f16>(float x) {
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Two values in one register, `low` in the lower half.
template <class T> DEV uint32_t pack2(float low, float high);
template <> DEV uint32_t pack2<bf16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}
template <> DEV uint32_t pack2<f16>(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// ---- memory ---------------------------------------------------------------------------------------------------------

DEV uint32_t shared_address(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }

// 16 bytes from global to shared memory, asynchronously; with valid == 0 nothing is read and zeros are written.
DEV void cp_async16(void* shared, const void* global, int valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid)
               : "memory");
}
DEV void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most PENDING of this thread's newest groups are unfinished.
template <int PENDING> DEV void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ---- tensor cores ---------------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
DEV void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
DEV void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// d[16x8] += a[16x16] * b[16x8], float32 accumulators. With g = lane / 4 and t = lane % 4:
//   d: d[0], d[1] are row g, columns 2t and 2t+1; d[2], d[3] the same of row g+8
//   a: a[0] row g, a[1] row g+8, columns 2t and 2t+1; a[2], a[3] the same 8 columns on
//   b: b[0] rows 2t and 2t+1 of column g; b[1] the same 8 rows on
template <class T> DEV void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);
template <> DEV void mma_16x8x16<bf16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> DEV void mma_16x8x16<f16>(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arithmetic -----------------------------------------------------------------------------------------------------

// 2^x within 2 ulp; 0 at -inf.
DEV float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
DEV float fast_tanh(float x) {  // from exp2: tanh.approx has only 11 bits
  const float e = fast_exp2(fminf(fabsf(x), 15.f) * (2.f * LOG2_E));
  return copysignf(1.f - __fdividef(2.f, e + 1.f), x);
}

DEV float silu(float x) { return x / (1.f + expf(-x)); }

// ---- 16-byte vectors ------------------------------------------------------------------------------------------------

template <class T> constexpr int VEC = 16 / sizeof(T);  // elements of a 16-byte vector

template <class T> struct alignas(16) Vector { T at[VEC<T>]; };

template <class T> DEV Vector<T> load_vector(const T* p) {
  const uint4 raw = *reinterpret_cast<const uint4*>(p);
  return *reinterpret_cast<const Vector<T>*>(&raw);
}
template <class T> DEV void store_vector(T* p, const Vector<T>& v) {
  *reinterpret_cast<uint4*>(p) = *reinterpret_cast<const uint4*>(&v);
}

// ---- reductions -----------------------------------------------------------------------------------------------------

DEV float warp_sum(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x += __shfl_xor_sync(ALL_LANES, x, offset);
  return x;
}
DEV float warp_max(float x) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, offset));
  return x;
}
// Sum over a block of THREADS; `scratch` holds THREADS / 32 floats and may be used again after the next barrier.
template <int THREADS> DEV float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int warp = 0; warp < THREADS / WARP; ++warp) total += scratch[warp];
  return total;
}
