/* Which streams last. torch never destroys the streams of its pools; one that is the program's own (torch.cuda.ExternalStream
 * over a stream of cupy's, numba's, TensorRT's) may be destroyed at any time, and torch lets its tensors outlive it.
 *
 * torch's ABI, looked up in the library that it has loaded: c10::cuda::getCurrentCUDAStream, and what its StreamId says
 * (CUDAStream.cpp, "Note [StreamId assignment]": the lowest bit is set for a stream of a pool, the id of a foreign stream is
 * its handle). */
#ifndef MO_TORCH_STREAMS_H
#define MO_TORCH_STREAMS_H

#include "driver/driver.h"

/* Whether the stream, of that device, is never destroyed: the default one, or the calling thread's current one where that is
 * of torch's pools. torch allocates on the current stream, so each of its own is known at its first request. False for what
 * cannot be told. Takes no lock that torch holds while it allocates. */
bool mo_torch_stream_lasts(int device, mo_stream stream);

#endif
