/*
 * What the scanner of trace events (_scan.c) is made on: memory that grows, texts that are each kept
 * once, and strict JSON read with a cursor. All of it is static, so that the compiler sees through it.
 */

#include <Python.h>

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEPTH 64

/* An argument that an event does not have. */
#define NO_VALUE INT64_MIN
/* An id that was recorded as a string is the string's code above this. */
#define ID_STRINGS (INT64_MIN + 1)
#define FIRST_ID (INT64_MIN + (INT64_C(1) << 32))

typedef enum { OK, MORE, BAD, NO_MEMORY } Status;

#define TRY(call)                                                                                 \
    do {                                                                                          \
        Status status_ = (call);                                                                  \
        if (status_ != OK)                                                                        \
            return status_;                                                                       \
    } while (0)

/* ------------------------------------------------------------------ growing memory */

typedef struct {
    char *data;
    size_t count, capacity; /* in items */
    size_t size;            /* of one item */
} Vec;

static Status
vec_reserve(Vec *vec, size_t more)
{
    if (more <= vec->capacity - vec->count)
        return OK;
    size_t capacity = vec->capacity ? vec->capacity : 1024;
    while (capacity - vec->count < more) {
        if (capacity > SIZE_MAX / 2 / vec->size)
            return NO_MEMORY;
        capacity *= 2;
    }
    char *data = realloc(vec->data, capacity * vec->size);
    if (data == NULL)
        return NO_MEMORY;
    vec->data = data;
    vec->capacity = capacity;
    return OK;
}

static Status
vec_append(Vec *vec, const void *items, size_t count)
{
    TRY(vec_reserve(vec, count));
    if (count)
        memcpy(vec->data + vec->count * vec->size, items, count * vec->size);
    vec->count += count;
    return OK;
}

static void
vec_free(Vec *vec)
{
    free(vec->data);
    vec->data = NULL;
    vec->count = vec->capacity = 0;
}

/* ------------------------------------------------------------------ texts, each kept once */

typedef struct {
    const uint8_t *at;
    size_t length;
    bool escaped; /* holds a backslash */
} Slice;

typedef struct {
    size_t offset, length;
    uint64_t hash;
} Text;

typedef struct {
    Vec bytes;  /* of all texts, one after the other */
    Vec texts;  /* Text, by code - 1: code 0 is for no text */
    Vec counts; /* int64, how often each was asked for */
    uint32_t *slots;
    size_t slot_count; /* a power of two, at least twice the number of texts */
} Interner;

static uint64_t
load8(const uint8_t *at)
{
    uint64_t found;
    memcpy(&found, at, 8);
    return found;
}

static uint64_t
load4(const uint8_t *at)
{
    uint32_t found;
    memcpy(&found, at, 4);
    return found;
}

static uint64_t
mixed(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * UINT64_C(0x9E3779B97F4A7C15);
    return hash ^ (hash >> 32);
}

static uint64_t
hash_of(const uint8_t *at, size_t length)
{
    uint64_t hash = mixed(UINT64_C(0x51A7F00D), length);
    if (length >= 8) {
        const uint8_t *last = at + length - 8;
        for (; at < last; at += 8)
            hash = mixed(hash, load8(at));
        return mixed(hash, load8(last));
    }
    if (length >= 4)
        return mixed(hash, load4(at) << 32 | load4(at + length - 4));
    if (length)
        hash = mixed(hash, (uint64_t)at[0] << 16 | (uint64_t)at[length / 2] << 8 | at[length - 1]);
    return hash;
}

static Status
interner_grow(Interner *in)
{
    size_t count = in->slot_count ? in->slot_count * 2 : 1024;
    uint32_t *slots = calloc(count, sizeof *slots);
    if (slots == NULL)
        return NO_MEMORY;
    const Text *texts = (const Text *)(void *)in->texts.data;
    for (size_t i = 0; i < in->texts.count; i++) {
        size_t slot = texts[i].hash & (count - 1);
        while (slots[slot])
            slot = (slot + 1) & (count - 1);
        slots[slot] = (uint32_t)(i + 1);
    }
    free(in->slots);
    in->slots = slots;
    in->slot_count = count;
    return OK;
}

static Status
intern(Interner *in, const uint8_t *at, size_t length, int32_t *code)
{
    if (in->texts.count * 2 >= in->slot_count) {
        if (in->texts.count >= INT32_MAX / 2)
            return NO_MEMORY;
        TRY(interner_grow(in));
    }
    uint64_t hash = hash_of(at, length);
    size_t slot = hash & (in->slot_count - 1);
    for (; in->slots[slot]; slot = (slot + 1) & (in->slot_count - 1)) {
        const Text *text = (const Text *)(void *)in->texts.data + (in->slots[slot] - 1);
        if (text->hash == hash && text->length == length
            && memcmp(in->bytes.data + text->offset, at, length) == 0) {
            *code = (int32_t)in->slots[slot];
            ((int64_t *)(void *)in->counts.data)[*code - 1] += 1;
            return OK;
        }
    }
    Text text = {in->bytes.count, length, hash};
    int64_t one = 1;
    /* Also for the empty text: there is always memory to point to. */
    TRY(vec_reserve(&in->bytes, length + 1));
    TRY(vec_append(&in->bytes, at, length));
    TRY(vec_append(&in->counts, &one, 1));
    TRY(vec_append(&in->texts, &text, 1));
    *code = (int32_t)in->texts.count;
    in->slots[slot] = (uint32_t)*code;
    return OK;
}

static void
interner_init(Interner *in)
{
    memset(in, 0, sizeof *in);
    in->bytes.size = 1;
    in->texts.size = sizeof(Text);
    in->counts.size = sizeof(int64_t);
}

static void
interner_free(Interner *in)
{
    vec_free(&in->bytes);
    vec_free(&in->texts);
    vec_free(&in->counts);
    free(in->slots);
    in->slots = NULL;
}

/* ------------------------------------------------------------------ JSON */

typedef struct {
    const uint8_t *at, *end;
    const char *why; /* of BAD */
} Cursor;

static Status
bad(Cursor *c, const char *why)
{
    c->why = why;
    return BAD;
}

/* To the next byte that is no blank; MORE when there is none. */
static inline Status
blanks(Cursor *c)
{
    const uint8_t *at = c->at;
    while (at < c->end && (*at == ' ' || *at == '\n' || *at == '\r' || *at == '\t'))
        at++;
    c->at = at;
    return at < c->end ? OK : MORE;
}

static inline Status
expect(Cursor *c, uint8_t wanted, const char *why)
{
    TRY(blanks(c));
    if (*c->at != wanted)
        return bad(c, why);
    c->at++;
    return OK;
}

static Status
hex4(Cursor *c, unsigned *found)
{
    *found = 0;
    for (int i = 0; i < 4; i++, c->at++) {
        if (c->at == c->end)
            return MORE;
        uint8_t b = *c->at;
        if (b >= '0' && b <= '9')
            *found = *found << 4 | (b - '0');
        else if ((b | 32) >= 'a' && (b | 32) <= 'f')
            *found = *found << 4 | ((b | 32) - 'a' + 10);
        else
            return bad(c, "a \\u escape without four hexadecimal digits");
    }
    return OK;
}

/* A backslash and what follows. */
static Status
escape(Cursor *c)
{
    if (c->end - c->at < 2)
        return MORE;
    uint8_t kind = c->at[1];
    c->at += 2;
    if (kind != 'u') {
        /* strchr would find the terminating zero too. */
        if (kind == 0 || strchr("\"\\/bfnrt", kind) == NULL)
            return bad(c, "an unknown escape in a string");
        return OK;
    }
    unsigned unit;
    TRY(hex4(c, &unit));
    if (unit < 0xD800 || unit > 0xDFFF)
        return OK;
    if (unit > 0xDBFF)
        return bad(c, "half a surrogate pair");
    if (c->end - c->at < 2)
        return MORE;
    if (c->at[0] != '\\' || c->at[1] != 'u')
        return bad(c, "half a surrogate pair");
    c->at += 2;
    TRY(hex4(c, &unit));
    return unit >= 0xDC00 && unit <= 0xDFFF ? OK : bad(c, "half a surrogate pair");
}

/* One character beyond ASCII in UTF-8 (RFC 3629, table of well-formed sequences). */
static Status
utf8(Cursor *c)
{
    uint8_t lead = *c->at, low = 0x80, high = 0xBF;
    int more;
    if (lead >= 0xC2 && lead <= 0xDF) {
        more = 1;
    } else if (lead >= 0xE0 && lead <= 0xEF) {
        more = 2;
        if (lead == 0xE0)
            low = 0xA0;
        if (lead == 0xED)
            high = 0x9F;
    } else if (lead >= 0xF0 && lead <= 0xF4) {
        more = 3;
        if (lead == 0xF0)
            low = 0x90;
        if (lead == 0xF4)
            high = 0x8F;
    } else {
        return bad(c, "invalid UTF-8");
    }
    if (c->end - c->at <= more)
        return MORE;
    if (c->at[1] < low || c->at[1] > high)
        return bad(c, "invalid UTF-8");
    for (int i = 2; i <= more; i++) {
        if ((c->at[i] & 0xC0) != 0x80)
            return bad(c, "invalid UTF-8");
    }
    c->at += more + 1;
    return OK;
}

#define EACH_BYTE(b) (UINT64_C(0x0101010101010101) * (b))

/* To the first byte that is not plain text within a string. */
static inline void
plain(Cursor *c)
{
    const uint8_t *at = c->at, *end = c->end;
    /* Eight bytes at once while none of them is special. A borrow can only blame a byte above one
       that is special itself, so that "none" is never wrong. */
    while (end - at >= 8) {
        uint64_t x = load8(at);
        uint64_t quote = x ^ EACH_BYTE('"'), backslash = x ^ EACH_BYTE('\\');
        uint64_t special = (x - EACH_BYTE(0x20)) | (quote - EACH_BYTE(1))
                           | (backslash - EACH_BYTE(1)) | x;
        if (special & EACH_BYTE(0x80))
            break;
        at += 8;
    }
    while (at < end && *at >= 0x20 && *at < 0x80 && *at != '"' && *at != '\\')
        at++;
    c->at = at;
}

/* A string; the slice is what stands between the quotes. */
static Status
string(Cursor *c, Slice *found)
{
    if (c->at == c->end)
        return MORE;
    if (*c->at != '"')
        return bad(c, "expected a string");
    c->at++;
    found->at = c->at;
    found->escaped = false;
    for (;;) {
        plain(c);
        if (c->at == c->end)
            return MORE;
        if (*c->at == '"')
            break;
        if (*c->at == '\\') {
            found->escaped = true;
            TRY(escape(c));
        } else if (*c->at >= 0x80) {
            TRY(utf8(c));
        } else {
            return bad(c, "a control character in a string");
        }
    }
    found->length = (size_t)(c->at - found->at);
    c->at++;
    return OK;
}

typedef struct {
    uint64_t whole;  /* magnitude of the part before the point */
    int thousandths; /* first three decimals */
    bool negative, integer;
    bool inexact; /* an exponent, more than three decimals, or more than 64 bits */
} Number;

static inline bool
is_digit(const Cursor *c)
{
    return c->at < c->end && *c->at >= '0' && *c->at <= '9';
}

static Status
number(Cursor *c, Number *n)
{
    *n = (Number){.integer = true};
    if (*c->at == '-') {
        n->negative = true;
        c->at++;
    }
    if (!is_digit(c))
        return c->at == c->end ? MORE : bad(c, "expected a value");
    if (*c->at == '0') {
        c->at++;
        if (is_digit(c))
            return bad(c, "a number with a leading zero");
    }
    for (; is_digit(c); c->at++) {
        uint64_t next = (uint64_t)(*c->at - '0');
        if (n->whole > (UINT64_MAX - next) / 10)
            n->inexact = true;
        n->whole = n->whole * 10 + next;
    }
    if (c->at < c->end && *c->at == '.') {
        n->integer = false;
        c->at++;
        if (!is_digit(c))
            return c->at == c->end ? MORE : bad(c, "a number without decimals after its point");
        for (int weight = 100; is_digit(c); c->at++, weight /= 10) {
            n->thousandths += (*c->at - '0') * weight;
            if (weight == 0 && *c->at != '0')
                n->inexact = true;
        }
    }
    if (c->at < c->end && (*c->at | 32) == 'e') {
        n->integer = false;
        n->inexact = true;
        c->at++;
        if (c->at < c->end && (*c->at == '+' || *c->at == '-'))
            c->at++;
        if (!is_digit(c))
            return c->at == c->end ? MORE : bad(c, "a number without digits in its exponent");
        while (is_digit(c))
            c->at++;
    }
    /* At the end of the piece more digits may follow. */
    return c->at == c->end ? MORE : OK;
}

/* The number as an integer; false when it is none of 64 bits, or is one of those kept for marks. */
static bool
as_integer(const Number *n, int64_t *found)
{
    if (!n->integer || n->inexact || n->whole > INT64_MAX)
        return false;
    *found = n->negative ? -(int64_t)n->whole : (int64_t)n->whole;
    return *found >= FIRST_ID;
}

static Status
literal(Cursor *c, const char *word)
{
    for (; *word; word++, c->at++) {
        if (c->at == c->end)
            return MORE;
        if (*c->at != (uint8_t)*word)
            return bad(c, "expected a value");
    }
    return OK;
}

static Status skip(Cursor *c, int depth);

static Status
skip_members(Cursor *c, int depth)
{
    Slice key;
    TRY(blanks(c));
    if (*c->at == '}') {
        c->at++;
        return OK;
    }
    for (;;) {
        TRY(blanks(c));
        TRY(string(c, &key));
        TRY(expect(c, ':', "expected : after a key"));
        TRY(skip(c, depth));
        TRY(blanks(c));
        if (*c->at == '}') {
            c->at++;
            return OK;
        }
        TRY(expect(c, ',', "expected , or } after a member"));
    }
}

static Status
skip_items(Cursor *c, int depth)
{
    TRY(blanks(c));
    if (*c->at == ']') {
        c->at++;
        return OK;
    }
    for (;;) {
        TRY(skip(c, depth));
        TRY(blanks(c));
        if (*c->at == ']') {
            c->at++;
            return OK;
        }
        TRY(expect(c, ',', "expected , or ] after an item"));
    }
}

/* Any value, blanks before it included; checked, not kept. */
static Status
skip(Cursor *c, int depth)
{
    Slice text;
    Number n;
    TRY(blanks(c));
    switch (*c->at) {
    case '"':
        return string(c, &text);
    case '{':
    case '[':
        if (depth >= MAX_DEPTH)
            return bad(c, "nested too deep");
        return *c->at++ == '{' ? skip_members(c, depth + 1) : skip_items(c, depth + 1);
    case 't':
        return literal(c, "true");
    case 'f':
        return literal(c, "false");
    case 'n':
        return literal(c, "null");
    default:
        return number(c, &n);
    }
}
