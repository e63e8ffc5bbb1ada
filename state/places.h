/* state/places.h: the part of places.h, which includes it, for the functions of state/. */
#ifndef KNAP_STATE_PLACES_H
#define KNAP_STATE_PLACES_H

/* state/dict.h */
#define kn_state_dict_(...)            KN_PLACE(kn_state_dict_(__VA_ARGS__))
#define kn_optim_state_dict_(...)      KN_PLACE(kn_optim_state_dict_(__VA_ARGS__))
#define kn_load_report_free(...)       KN_PLACE(kn_load_report_free(__VA_ARGS__))
#define kn_load_state_dict_(...)       KN_PLACE(kn_load_state_dict_(__VA_ARGS__))
#define kn_load_optim_state_dict_(...) KN_PLACE(kn_load_optim_state_dict_(__VA_ARGS__))
#define kn_state_dict_type_(...)       KN_PLACE(kn_state_dict_type_(__VA_ARGS__))
#define kn_state_dict_type_end(...)    KN_PLACE(kn_state_dict_type_end(__VA_ARGS__))
#define kn_state_put_(...)             KN_PLACE(kn_state_put_(__VA_ARGS__))
#define kn_state_get_(...)             KN_PLACE(kn_state_get_(__VA_ARGS__))
#define kn_state_new(...)              KN_PLACE(kn_state_new(__VA_ARGS__))
#define kn_state_free(...)             KN_PLACE(kn_state_free(__VA_ARGS__))
#define kn_state_count(...)            KN_PLACE(kn_state_count(__VA_ARGS__))
#define kn_state_name(...)             KN_PLACE(kn_state_name(__VA_ARGS__))
#define kn_state_has(...)              KN_PLACE(kn_state_has(__VA_ARGS__))
#define kn_state_type(...)             KN_PLACE(kn_state_type(__VA_ARGS__))
#define kn_state_set_int(...)          KN_PLACE(kn_state_set_int(__VA_ARGS__))
#define kn_state_set_number(...)       KN_PLACE(kn_state_set_number(__VA_ARGS__))
#define kn_state_set_text(...)         KN_PLACE(kn_state_set_text(__VA_ARGS__))
#define kn_state_set_tensor(...)       KN_PLACE(kn_state_set_tensor(__VA_ARGS__))
#define kn_state_int(...)              KN_PLACE(kn_state_int(__VA_ARGS__))
#define kn_state_number(...)           KN_PLACE(kn_state_number(__VA_ARGS__))
#define kn_state_text(...)             KN_PLACE(kn_state_text(__VA_ARGS__))
#define kn_state_tensor(...)           KN_PLACE(kn_state_tensor(__VA_ARGS__))
#define kn_state_remove(...)           KN_PLACE(kn_state_remove(__VA_ARGS__))
#define kn_state_merge(...)            KN_PLACE(kn_state_merge(__VA_ARGS__))
#define kn_state_rekey(...)            KN_PLACE(kn_state_rekey(__VA_ARGS__))
#define kn_state_save(...)             KN_PLACE(kn_state_save(__VA_ARGS__))
#define kn_state_open(...)             KN_PLACE(kn_state_open(__VA_ARGS__))

/* state/folder.h */
#define kn_run_folder_claim_(...)         KN_PLACE(kn_run_folder_claim_(__VA_ARGS__))
#define kn_run_folder_release(...)        KN_PLACE(kn_run_folder_release(__VA_ARGS__))
#define kn_run_folder_best(...)           KN_PLACE(kn_run_folder_best(__VA_ARGS__))
#define kn_run_folder_has_checkpoint(...) KN_PLACE(kn_run_folder_has_checkpoint(__VA_ARGS__))

/* state/checkpoint.h */
#define kn_checkpoint_save_(...)      KN_PLACE(kn_checkpoint_save_(__VA_ARGS__))
#define kn_checkpoint_copy_bytes(...) KN_PLACE(kn_checkpoint_copy_bytes(__VA_ARGS__))
#define kn_checkpoint_poll(...)       KN_PLACE(kn_checkpoint_poll(__VA_ARGS__))
#define kn_checkpoint_finish(...)     KN_PLACE(kn_checkpoint_finish(__VA_ARGS__))
#define kn_checkpoint_wait(...)       KN_PLACE(kn_checkpoint_wait(__VA_ARGS__))
#define kn_checkpoint_open(...)       KN_PLACE(kn_checkpoint_open(__VA_ARGS__))
#define kn_checkpoint_free(...)       KN_PLACE(kn_checkpoint_free(__VA_ARGS__))
#define kn_checkpoint_step(...)       KN_PLACE(kn_checkpoint_step(__VA_ARGS__))
#define kn_checkpoint_folder(...)     KN_PLACE(kn_checkpoint_folder(__VA_ARGS__))
#define kn_checkpoint_config(...)     KN_PLACE(kn_checkpoint_config(__VA_ARGS__))
#define kn_checkpoint_record(...)     KN_PLACE(kn_checkpoint_record(__VA_ARGS__))
#define kn_checkpoint_file_data(...)  KN_PLACE(kn_checkpoint_file_data(__VA_ARGS__))
#define kn_checkpoint_has(...)        KN_PLACE(kn_checkpoint_has(__VA_ARGS__))
#define kn_checkpoint_describe(...)   KN_PLACE(kn_checkpoint_describe(__VA_ARGS__))
#define kn_checkpoint_get(...)        KN_PLACE(kn_checkpoint_get(__VA_ARGS__))
#define kn_checkpoint_load_(...)      KN_PLACE(kn_checkpoint_load_(__VA_ARGS__))

#endif
