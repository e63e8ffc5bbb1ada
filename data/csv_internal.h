/* data/csv_internal.h (private): the fields of a text file, one after another. */
#ifndef KNAP_DATA_CSV_INTERNAL_H
#define KNAP_DATA_CSV_INTERNAL_H

#include "data/csv.h"

typedef struct kn_csv_scan {
    const char *path;
    const char *at, *end;
    char separator;
    int64_t line, column; /* of the field read last, from 1 */
    int64_t next_line;
} kn_csv_scan;

typedef struct kn_csv_field {
    const char *text; /* without quotes and the blanks around it */
    size_t length;
    bool quoted; /* "" in it stands for " */
    bool last;   /* of its line */
} kn_csv_field;

void kn_csv_begin(kn_csv_scan *s, const char *path, const char *text, size_t size, char separator);
/* Passes empty lines; false at the end of the file. Call it before the first field of a line. */
bool kn_csv_more(kn_csv_scan *s);
/* The next field of the line; false with an error. */
bool kn_csv_next(kn_csv_scan *s, kn_csv_field *field);

typedef enum kn_csv_kind { KN_CSV_NUMBER, KN_CSV_MISSING, KN_CSV_TEXT } kn_csv_kind;
kn_csv_kind kn_csv_kind_of(const kn_csv_field *f, double *value);
/* Writes the field as a dtype to p; false without an error if the dtype can't hold it. */
bool kn_csv_store(const kn_csv_field *f, double value, kn_dtype dtype, void *p);

#endif
