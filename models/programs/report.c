/* models/programs/report.c: the table at the start, the progress line. */
#include "kernels/trace.h"
#include "models/programs/report.h"

#include <math.h>
#include <stdarg.h>
#include <string.h>
#include <unistd.h>

void report_row(const char *name, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    printf("  %-18s ", name);
    vprintf(format, args);
    printf("\n");
    va_end(args);
}

const char *report_bytes(double bytes, char *buf, size_t size)
{
    static const char *const unit[] = { "B", "kB", "MB", "GB", "TB" };
    int i = 0;
    for (; bytes >= 1000 && i < 4; i++)
        bytes /= 1000;
    snprintf(buf, size, i ? "%.1f %s" : "%.0f %s", bytes, unit[i]);
    return buf;
}

void progress_begin(progress *p, const char *item)
{
    *p = (progress){ .tty = isatty(STDOUT_FILENO), .item = item };
}

/* "1 h 02 min", "3 min 20 s", "12 s" */
static const char *duration(double s, char *buf, size_t size)
{
    long n = lround(s);
    if (n >= 3600)
        snprintf(buf, size, "%ld h %02ld min", n / 3600, n / 60 % 60);
    else if (n >= 60)
        snprintf(buf, size, "%ld min %02ld s", n / 60, n % 60);
    else
        snprintf(buf, size, "%ld s", n);
    return buf;
}

double report_peak(const char *gpu, bool half, bool tf32)
{
    /* TFLOP/s, dense; the longer name first */
    static const struct {
        const char *name;
        double half, tf32, f32;
    } peak[] = {
        { "B200", 2250, 1125, 75 },        { "GH200", 989.4, 494.7, 66.9 },
        { "H200", 989.4, 494.7, 66.9 },    { "H100 PCIe", 756, 378, 51 },
        { "H100", 989.4, 494.7, 66.9 },    { "A100", 312, 156, 19.5 },
        { "L40S", 362, 183, 91.6 },        { "RTX 5090", 209.5, 104.8, 104.8 },
        { "RTX 4090", 165.2, 82.6, 82.6 },
    };
    for (size_t i = 0; gpu && i < sizeof peak / sizeof *peak; i++)
        if (strstr(gpu, peak[i].name))
            return 1e12 * (half ? peak[i].half : tf32 ? peak[i].tf32 : peak[i].f32);
    return 0;
}

static const char *utilisation(const progress *p, char *buf, size_t size)
{
    if (!p->has_mfu)
        buf[0] = 0;
    else if (p->peak_flops > 0)
        snprintf(buf, size, "  MFU %.1f %%", 100 * p->per_second * p->item_flops / p->peak_flops);
    else
        snprintf(buf, size, "  MFU n/a");
    return buf;
}

const char *report_evaluation(const step_report *r, char *buf, size_t size)
{
    char more[64] = "";
    if (r->has_accuracy)
        snprintf(more, sizeof more, ", %.2f %% right", 100 * r->accuracy);
    else if (r->bits_per_byte > 0)
        snprintf(more, sizeof more, ", perplexity %.4g, %.4f bits/byte", r->perplexity,
                 r->bits_per_byte);
    else if (r->perplexity > 0)
        snprintf(more, sizeof more, ", perplexity %.4g", r->perplexity);
    snprintf(buf, size, "val %.4f%s", r->val_loss, more);
    return buf;
}

bool progress_step(progress *p, const step_report *r)
{
    char left[32], val[96] = "", mfu[32], muon[32] = "";
    double now = kn_now(), rate = (double)r->items / r->seconds;
    p->per_second = p->per_second > 0 ? 0.95 * p->per_second + 0.05 * rate : rate;
    bool line = r->has_val || r->step == r->steps;
    if (!line && now - p->last < (p->tty ? 0.1 : 10))
        return true;
    p->last = now;
    double per_step = (double)r->items / p->per_second;
    if (r->has_val)
        report_evaluation(r, val, sizeof val);
    if (r->muon > 0)
        snprintf(muon, sizeof muon, "  muon %.0f %%", 100 * r->muon / r->seconds);
    printf("%sstep %lld/%lld  loss %.4f%s%s  %.0f %s/s%s%s  %s left%s", p->tty ? "\r" : "",
           (long long)r->step, (long long)r->steps, r->loss, r->has_val ? "  " : "", val,
           p->per_second, p->item, utilisation(p, mfu, sizeof mfu), muon,
           duration(per_step * (double)(r->steps - r->step), left, sizeof left),
           p->tty ? "\x1b[K" : "");
    if (line || !p->tty)
        printf("\n");
    return fflush(stdout) == 0 && !ferror(stdout);
}
