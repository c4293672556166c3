/* A whole forward pass: every thread runs `decode`, and meets the others between its phases. */
#include <string.h>

#include "context.h"
#include "kernels.h"
#include "kv.h"
#include "threads.h"

enum { ROW_BLOCK = 128 /* rows whose activations stay in the second-level cache while the panels pass */ };

typedef struct {
    fw_context *context;
    const fw_model *model;
    const fw_batch *batch;
    int32_t rows;
    float *qkv, *attended, *gate_up, *branch; /* [rows, ...] */
    char *act;                                /* [rows] encoded activations, then one row per thread */
    int64_t act_stride;
    float *parts;   /* of split rows: see fw_split */
    float *scratch; /* per thread */
    int64_t scratch_floats;
    _Atomic int32_t *counters; /* one per phase that deals its work out piece by piece */
} pass;

static void share(int32_t total, int thread, int num_threads, int32_t *begin, int32_t *end)
{
    *begin = (int32_t)((int64_t)total * thread / num_threads);
    *end = (int32_t)((int64_t)total * (thread + 1) / num_threads);
}

/* --- phases ------------------------------------------------------------------------------------------------------- */

typedef struct {
    pass *p;
    int thread, num_threads;
    int32_t rows;  /* that are still computed */
    int32_t phase; /* index of the next counter */
} worker;

static void meet(worker *w) { fw_pool_barrier(w->p->context->pool, w->thread); }

/* Encode every row for `linear`: source() leaves the row in scratch, or in place when it returns another pointer.
 * A single row is encoded by every thread for itself, which costs less than waiting for the one that would. */
typedef const float *(*row_source)(const worker *, const fw_layer *, int32_t row, float *scratch);

static const char *encode_rows(worker *w, const fw_layer *layer, const fw_linear *linear, row_source source)
{
    pass *p = w->p;
    const fw_kernels *kernels = p->context->kernels;
    float *scratch = p->scratch + w->thread * p->scratch_floats;
    if (w->rows == 1) {
        char *own = p->act + w->thread * p->act_stride;
        kernels->encode(linear->kind, source(w, layer, 0, scratch), linear->k, own);
        return own;
    }
    int32_t begin, end;
    share(w->rows, w->thread, w->num_threads, &begin, &end);
    for (int32_t row = begin; row < end; ++row)
        kernels->encode(linear->kind, source(w, layer, row, scratch), linear->k, p->act + row * p->act_stride);
    meet(w);
    return p->act;
}

/* The product of the encoded rows, panels dealt out to the threads; ends with all threads here. */
static void multiply(worker *w, const fw_linear *linear, const char *act, int64_t stride, int32_t rows, float *out,
                     int accumulate)
{
    _Atomic int32_t *counter = w->p->counters + w->phase++;
    const int32_t panels = (linear->n + FW_PANEL - 1) / FW_PANEL;
    const int32_t blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
    int32_t piece = panels / (w->num_threads * 6);
    piece = piece < 1 ? 1 : piece;
    const int32_t pieces = (panels + piece - 1) / piece;
    for (int32_t next; (next = atomic_fetch_add(counter, 1)) < pieces * blocks;) {
        int32_t first = next % pieces * piece, last = first + piece < panels ? first + piece : panels;
        int32_t row = next / pieces * ROW_BLOCK, count = rows - row < ROW_BLOCK ? rows - row : ROW_BLOCK;
        w->p->context->kernels->linear(linear, act + row * stride, stride, count, first, last,
                                       out + (int64_t)row * linear->n, accumulate);
    }
    meet(w);
}

static const float *attention_input(const worker *w, const fw_layer *layer, int32_t row, float *scratch)
{
    const fw_model *model = w->p->model;
    w->p->context->kernels->rms_norm(w->p->batch->hidden + (int64_t)row * model->hidden, layer->attention_norm,
                                     model->eps, model->hidden, scratch);
    return scratch;
}

static const float *output_input(const worker *w, const fw_layer *layer, int32_t row, float *scratch)
{
    (void)layer, (void)scratch;
    return w->p->attended + (int64_t)row * w->p->model->num_heads * w->p->model->head_dim;
}

static const float *mlp_input(const worker *w, const fw_layer *layer, int32_t row, float *scratch)
{
    const fw_model *model = w->p->model;
    w->p->context->kernels->rms_norm(w->p->batch->hidden + (int64_t)row * model->hidden, layer->mlp_norm, model->eps,
                                     model->hidden, scratch);
    return scratch;
}

static const float *down_input(const worker *w, const fw_layer *layer, int32_t row, float *scratch)
{
    (void)layer;
    const fw_model *model = w->p->model;
    w->p->context->kernels->gated(w->p->gate_up + (int64_t)row * 2 * model->inner, model->inner, model->gelu, scratch);
    return scratch;
}

/* Norm and rotate queries and keys in place, and write keys and values into the pool. */
static void place(worker *w, const fw_layer *layer, const fw_kv *kv)
{
    const fw_model *model = w->p->model;
    const fw_kernels *kernels = w->p->context->kernels;
    const fw_batch *batch = w->p->batch;
    const int32_t dim = model->head_dim, heads = model->num_heads, kv_heads = model->num_kv_heads;
    int32_t begin, end;
    share(w->rows, w->thread, w->num_threads, &begin, &end);
    for (int32_t row = begin; row < end; ++row) {
        float *qkv = w->p->qkv + (int64_t)row * (heads + 2 * kv_heads) * dim;
        const int64_t angle = (int64_t)batch->attention->positions[row] * (dim / 2);
        for (int32_t head = 0; head < heads + kv_heads; ++head) {
            float *x = qkv + (int64_t)head * dim;
            const float *norm = head < heads ? layer->query_norm : layer->key_norm;
            if (norm) kernels->rms_norm(x, norm, model->eps, dim, x);
            if (layer->cos) kernels->rotate(x, layer->cos + angle, layer->sin + angle, dim);
        }
        for (int32_t head = 0; head < kv_heads; ++head)
            fw_store_slot(model, kv, head, batch->slots[row], qkv + (int64_t)(heads + head) * dim,
                          qkv + (int64_t)(heads + kv_heads + head) * dim);
    }
    meet(w);
}

static void attend_all(worker *w, const fw_layer *layer, const fw_attention *plan, const fw_kv *kv, const float *query,
                       int64_t query_stride, float *out)
{
    const fw_model *model = w->p->model;
    _Atomic int32_t *counter = w->p->counters + w->phase++;
    float *scratch = w->p->scratch + w->thread * w->p->scratch_floats;
    for (int32_t next; (next = atomic_fetch_add(counter, 1)) < plan->num_tasks * model->num_kv_heads;)
        w->p->context->kernels->attend(model, layer, plan, plan->tasks + next / model->num_kv_heads,
                                       next % model->num_kv_heads, kv, query, query_stride, out, w->p->parts, scratch);
    meet(w);
    if (!plan->num_splits) return;
    int32_t begin, end;
    share(plan->num_splits * model->num_kv_heads, w->thread, w->num_threads, &begin, &end);
    for (int32_t i = begin; i < end; ++i)
        w->p->context->kernels->merge(model, plan, plan->splits + i / model->num_kv_heads, i % model->num_kv_heads,
                                      w->p->parts, out, scratch);
    meet(w);
}

/* hidden += norm(branch), for models that norm what a branch returns. */
static void add_normed(worker *w, const float *norm)
{
    const int32_t n = w->p->model->hidden;
    float *scratch = w->p->scratch + w->thread * w->p->scratch_floats;
    int32_t begin, end;
    share(w->rows, w->thread, w->num_threads, &begin, &end);
    for (int32_t row = begin; row < end; ++row) {
        w->p->context->kernels->rms_norm(w->p->branch + (int64_t)row * n, norm, w->p->model->eps, n, scratch);
        float *hidden = w->p->batch->hidden + (int64_t)row * n;
        for (int32_t i = 0; i < n; ++i) hidden[i] += scratch[i];
    }
    meet(w);
}

/* The last product of a branch, added to the hidden states. */
static void add_branch(worker *w, const fw_layer *layer, const fw_linear *linear, row_source source, const float *norm)
{
    pass *p = w->p;
    const char *act = encode_rows(w, layer, linear, source);
    multiply(w, linear, act, p->act_stride, w->rows, norm ? p->branch : p->batch->hidden, norm == NULL);
    if (norm) add_normed(w, norm);
}

/* Behind the last attention: go on with the rows alone whose results are wanted, moved to the front. */
static void keep_outputs(worker *w)
{
    const fw_batch *batch = w->p->batch;
    const int32_t hidden = w->p->model->hidden, heads = w->p->model->num_heads * w->p->model->head_dim;
    if (batch->num_outputs == w->rows) return;
    if (w->thread == 0)
        for (int32_t i = 0; i < batch->num_outputs; ++i) {
            const int64_t from = batch->outputs[i];
            if (from == i) continue;
            memcpy(batch->hidden + (int64_t)i * hidden, batch->hidden + from * hidden, 4 * (size_t)hidden);
            memcpy(w->p->attended + (int64_t)i * heads, w->p->attended + from * heads, 4 * (size_t)heads);
        }
    w->rows = batch->num_outputs;
    meet(w);
}

static void decode(void *argument, int thread, int num_threads)
{
    pass *p = argument;
    worker self = {p, thread, num_threads, p->rows, 0}, *w = &self;
    const fw_model *model = p->model;
    const fw_attention *plan = p->batch->attention;
    const int64_t query_stride = (int64_t)(model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    for (int32_t number = 0; number < model->num_layers; ++number) {
        const fw_layer *layer = model->layers + number;
        const fw_kv *kv = p->batch->kv + number;
        const char *act = encode_rows(w, layer, &layer->qkv, attention_input);
        multiply(w, &layer->qkv, act, p->act_stride, w->rows, p->qkv, 0);
        place(w, layer, kv);
        attend_all(w, layer, plan, kv, p->qkv, query_stride, p->attended);
        if (number == model->num_layers - 1) keep_outputs(w);
        add_branch(w, layer, &layer->output, output_input, layer->attention_post_norm);
        act = encode_rows(w, layer, &layer->gate_up, mlp_input);
        multiply(w, &layer->gate_up, act, p->act_stride, w->rows, p->gate_up, 0);
        add_branch(w, layer, &layer->down, down_input, layer->mlp_post_norm);
    }
    int32_t begin, end;
    share(w->rows, thread, num_threads, &begin, &end);
    for (int32_t row = begin; row < end; ++row) {
        float *hidden = p->batch->hidden + (int64_t)row * model->hidden;
        p->context->kernels->rms_norm(hidden, model->final_norm, model->eps, model->hidden, hidden);
    }
}

static int32_t most_rows(const fw_attention *plan)
{
    int32_t most = 0;
    for (int32_t i = 0; i < plan->num_tasks; ++i) {
        int32_t rows = plan->tasks[i].row_end - plan->tasks[i].row_begin;
        most = rows > most ? rows : most;
    }
    return most;
}

static int64_t part_bytes(const fw_model *model, const fw_attention *plan)
{
    return plan->num_parts * model->num_heads * fw_part_floats(model) * (int64_t)sizeof(float);
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

int fw_forward(fw_context *context, const fw_model *model, const fw_batch *batch)
{
    const fw_kernels *kernels = context->kernels;
    const int32_t rows = batch->attention->num_tokens, threads = fw_pool_size(context->pool);
    const int64_t heads = (int64_t)model->num_heads * model->head_dim;
    const int64_t qkv = heads + 2 * (int64_t)model->num_kv_heads * model->head_dim;
    pass p = {context, model, batch, rows};
    for (int32_t i = 0; i < model->num_layers; ++i) {
        const fw_linear *all[4] = {&model->layers[i].qkv, &model->layers[i].output, &model->layers[i].gate_up,
                                   &model->layers[i].down};
        for (int j = 0; j < 4; ++j) p.act_stride = larger(p.act_stride, kernels->act_bytes(all[j]->kind, all[j]->k));
    }
    p.act_stride = (p.act_stride + 63) & ~(int64_t)63;
    p.scratch_floats = larger(fw_attend_scratch(model, most_rows(batch->attention)), larger(model->inner, model->hidden));
    p.scratch_floats = (p.scratch_floats + 31) & ~(int64_t)15;
    const int32_t phases = 5 * model->num_layers;
    const int64_t sizes[] = {rows * qkv * 4, rows * heads * 4, (int64_t)rows * 2 * model->inner * 4,
                             (int64_t)rows * model->hidden * 4, larger(rows, threads) * p.act_stride,
                             threads * p.scratch_floats * 4, phases * 4, part_bytes(model, batch->attention)};
    int64_t total = 0;
    for (int i = 0; i < 8; ++i) total += (sizes[i] + 63) & ~(int64_t)63;
    if (!fw_reserve(context, total)) return 0;
    char *at = context->memory;
    p.qkv = fw_carve(&at, sizes[0]);
    p.attended = fw_carve(&at, sizes[1]);
    p.gate_up = fw_carve(&at, sizes[2]);
    p.branch = fw_carve(&at, sizes[3]);
    p.act = fw_carve(&at, sizes[4]);
    p.scratch = fw_carve(&at, sizes[5]);
    p.counters = fw_carve(&at, sizes[6]);
    memset((void *)p.counters, 0, sizes[6]);
    p.parts = fw_carve(&at, sizes[7]);
    fw_pool_run(context->pool, decode, &p);
    return 1;
}

/* --- single operations ---------------------------------------------------------------------------------------------- */

typedef struct {
    pass p;
    const fw_linear *linear;
    const float *x;
    float *out;
} apply_job;

static void apply(void *argument, int thread, int num_threads)
{
    apply_job *job = argument;
    worker w = {&job->p, thread, num_threads, job->p.rows, 0};
    int32_t begin, end;
    share(job->p.rows, thread, num_threads, &begin, &end);
    for (int32_t row = begin; row < end; ++row)
        job->p.context->kernels->encode(job->linear->kind, job->x + (int64_t)row * job->linear->k, job->linear->k,
                                        job->p.act + row * job->p.act_stride);
    meet(&w);
    multiply(&w, job->linear, job->p.act, job->p.act_stride, job->p.rows, job->out, 0);
}

int fw_apply(fw_context *context, const fw_linear *linear, const float *x, int32_t rows, float *out)
{
    apply_job job = {{context, NULL, NULL, rows}, linear, x, out};
    job.p.act_stride = (context->kernels->act_bytes(linear->kind, linear->k) + 63) & ~(int64_t)63;
    if (!fw_reserve(context, rows * job.p.act_stride + 64)) return 0;
    char *at = context->memory;
    job.p.act = fw_carve(&at, rows * job.p.act_stride);
    job.p.counters = fw_carve(&at, 4);
    memset((void *)job.p.counters, 0, 4);
    fw_pool_run(context->pool, apply, &job);
    return 1;
}

typedef struct {
    pass p;
    const fw_layer *layer;
    const fw_attention *plan;
    const fw_kv *kv;
    const float *query;
    int64_t query_stride;
    float *out;
} attend_job;

static void attend(void *argument, int thread, int num_threads)
{
    attend_job *job = argument;
    worker w = {&job->p, thread, num_threads, job->p.rows, 0};
    attend_all(&w, job->layer, job->plan, job->kv, job->query, job->query_stride, job->out);
}

int fw_attend(fw_context *context, const fw_model *model, const fw_layer *layer, const fw_attention *plan,
              const fw_kv *kv, const float *query, int64_t query_stride, float *out)
{
    attend_job job = {{context, model, NULL, plan->num_tokens}, layer, plan, kv, query, query_stride, out};
    job.p.scratch_floats = (fw_attend_scratch(model, most_rows(plan)) + 31) & ~(int64_t)15;
    const int64_t scratch = fw_pool_size(context->pool) * job.p.scratch_floats * 4;
    if (!fw_reserve(context, scratch + part_bytes(model, plan) + 192)) return 0;
    char *at = context->memory;
    job.p.scratch = fw_carve(&at, scratch);
    job.p.parts = fw_carve(&at, part_bytes(model, plan));
    job.p.counters = fw_carve(&at, 4);
    memset((void *)job.p.counters, 0, 4);
    fw_pool_run(context->pool, attend, &job);
    return 1;
}

void fw_store_kv(const fw_model *model, const fw_kv *kv, const int32_t *slots, int32_t rows, const float *key,
                 const float *value, int64_t stride)
{
    for (int32_t row = 0; row < rows; ++row)
        for (int32_t head = 0; head < model->num_kv_heads; ++head)
            fw_store_slot(model, kv, head, slots[row], key + row * stride + (int64_t)head * model->head_dim,
                          value + row * stride + (int64_t)head * model->head_dim);
}

void fw_argmax(fw_context *context, const float *x, int32_t rows, int64_t n, int32_t *out)
{
    for (int32_t row = 0; row < rows; ++row) out[row] = context->kernels->argmax(x + row * n, n);
}
