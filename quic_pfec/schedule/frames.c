/* Frame headers: docs/wire.md section 4, as the encoders of wire/frames.py, which stay the specification. */
#include "core.h"

#include <string.h>

/* Experimental and unregistered; all take the 4-byte varint form. */
static const uint32_t TYPE_SOURCE = 0x0FDA91AB, TYPE_REPAIR = 0x11E8E783, TYPE_MANIFEST = 0x30192341;
enum { TYPE_SIZE = 4, SID_SIZE = 4, LENGTH_SIZE = 2, NUMBER_SIZE = 4 };

size_t varint_size(uint64_t value)
{
    if (value <= 0x3F)
        return 1;
    if (value <= 0x3FFF)
        return 2;
    return value <= 0x3FFFFFFF ? 4 : 8;
}

static uint8_t *put(uint8_t *out, uint64_t value, size_t bytes)
{
    for (size_t i = bytes; i-- > 0; value >>= 8)
        out[i] = (uint8_t)value;
    return out + bytes;
}

static uint8_t *put_varint(uint8_t *out, uint64_t value)
{
    size_t bytes = varint_size(value);
    uint8_t *end = put(out, value, bytes);
    out[0] |= (uint8_t)(bytes == 1 ? 0x00 : bytes == 2 ? 0x40 : bytes == 4 ? 0x80 : 0xC0);
    return end;
}

static uint8_t *put_type(uint8_t *out, uint32_t type)
{
    return put(out, 0x80000000u | type, TYPE_SIZE);
}

size_t frame_source_overhead(uint64_t transfer_id)
{
    return TYPE_SIZE + varint_size(transfer_id) + SID_SIZE + LENGTH_SIZE;
}

size_t frame_repair_overhead(uint64_t transfer_id, uint64_t degree, const coding_set *set)
{
    return TYPE_SIZE + varint_size(transfer_id) + NUMBER_SIZE + SID_SIZE + varint_size(degree) +
           varint_size(set->head_span) + (set->head_span + 7) / 8 + varint_size(set->tail_offset) +
           varint_size(set->tail_span) + LENGTH_SIZE;
}

size_t frame_manifest_overhead(uint64_t transfer_id, uint32_t total, uint32_t offset, uint64_t remaining_us, uint32_t size)
{
    return TYPE_SIZE + varint_size(transfer_id) + varint_size(total) + varint_size(offset) + varint_size(remaining_us) +
           varint_size(size);
}

size_t frame_write_source(uint8_t *out, uint64_t transfer_id, uint32_t sid, uint32_t symbol_size)
{
    uint8_t *at = put_varint(put_type(out, TYPE_SOURCE), transfer_id);
    at = put(at, 0x80000000u | sid, SID_SIZE);
    at = put(at, 0x4000u | symbol_size, LENGTH_SIZE);
    return (size_t)(at - out);
}

size_t frame_write_repair(uint8_t *out, uint64_t transfer_id, uint32_t number, uint32_t degree, const coding_set *set,
                          const uint8_t *head, uint32_t symbol_size)
{
    size_t head_bytes = (set->head_span + 7) / 8;
    uint8_t *at = put_varint(put_type(out, TYPE_REPAIR), transfer_id);
    at = put(at, number, NUMBER_SIZE);
    at = put(at, 0x80000000u | set->first_sid, SID_SIZE);
    at = put_varint(at, degree);
    at = put_varint(at, set->head_span);
    memcpy(at, head, head_bytes);
    at = put_varint(at + head_bytes, set->tail_offset);
    at = put_varint(at, set->tail_span);
    at = put(at, 0x4000u | symbol_size, LENGTH_SIZE);
    return (size_t)(at - out);
}

size_t frame_write_manifest(uint8_t *out, uint64_t transfer_id, uint32_t total, uint32_t offset, uint64_t remaining_us,
                            uint32_t size)
{
    uint8_t *at = put_varint(put_type(out, TYPE_MANIFEST), transfer_id);
    at = put_varint(put_varint(at, total), offset);
    at = put_varint(put_varint(at, remaining_us), size);
    return (size_t)(at - out);
}
