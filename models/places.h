/* models/places.h: the part of places.h, which includes it, for the functions of models/. */
#ifndef KNAP_MODELS_PLACES_H
#define KNAP_MODELS_PLACES_H

/* models/gpt.h */
#define kn_gpt_preset(...)          KN_PLACE(kn_gpt_preset(__VA_ARGS__))
#define kn_gpt_init(...)            KN_PLACE(kn_gpt_init(__VA_ARGS__))
#define kn_gpt_logits(...)          KN_PLACE(kn_gpt_logits(__VA_ARGS__))
#define kn_gpt_next_logits(...)     KN_PLACE(kn_gpt_next_logits(__VA_ARGS__))
#define kn_gpt_loss(...)            KN_PLACE(kn_gpt_loss(__VA_ARGS__))
#define kn_gpt_config_of(...)       KN_PLACE(kn_gpt_config_of(__VA_ARGS__))
#define kn_gpt_recompute(...)       KN_PLACE(kn_gpt_recompute(__VA_ARGS__))
#define kn_gpt_config_saved(...)    KN_PLACE(kn_gpt_config_saved(__VA_ARGS__))
#define kn_gpt_flops_per_token(...) KN_PLACE(kn_gpt_flops_per_token(__VA_ARGS__))

/* models/llama.h */
#define kn_llama_preset(...)          KN_PLACE(kn_llama_preset(__VA_ARGS__))
#define kn_llama_config_check(...)    KN_PLACE(kn_llama_config_check(__VA_ARGS__))
#define kn_llama_init(...)            KN_PLACE(kn_llama_init(__VA_ARGS__))
#define kn_llama_logits(...)          KN_PLACE(kn_llama_logits(__VA_ARGS__))
#define kn_llama_next_logits(...)     KN_PLACE(kn_llama_next_logits(__VA_ARGS__))
#define kn_llama_loss(...)            KN_PLACE(kn_llama_loss(__VA_ARGS__))
#define kn_llama_config_of(...)       KN_PLACE(kn_llama_config_of(__VA_ARGS__))
#define kn_llama_recompute(...)       KN_PLACE(kn_llama_recompute(__VA_ARGS__))
#define kn_llama_config_saved(...)    KN_PLACE(kn_llama_config_saved(__VA_ARGS__))
#define kn_llama_flops_per_token(...) KN_PLACE(kn_llama_flops_per_token(__VA_ARGS__))

/* models/resnet.h */
#define kn_resnet_preset(...)       KN_PLACE(kn_resnet_preset(__VA_ARGS__))
#define kn_resnet_config_check(...) KN_PLACE(kn_resnet_config_check(__VA_ARGS__))
#define kn_resnet_init(...)         KN_PLACE(kn_resnet_init(__VA_ARGS__))
#define kn_resnet_config_of(...)    KN_PLACE(kn_resnet_config_of(__VA_ARGS__))
#define kn_resnet_config_text(...)  KN_PLACE(kn_resnet_config_text(__VA_ARGS__))
#define kn_resnet_config_saved(...) KN_PLACE(kn_resnet_config_saved(__VA_ARGS__))
#define kn_resnet_recompute(...)    KN_PLACE(kn_resnet_recompute(__VA_ARGS__))

/* models/vit.h */
#define kn_vit_preset(...)       KN_PLACE(kn_vit_preset(__VA_ARGS__))
#define kn_vit_config_check(...) KN_PLACE(kn_vit_config_check(__VA_ARGS__))
#define kn_vit_init(...)         KN_PLACE(kn_vit_init(__VA_ARGS__))
#define kn_vit_config_of(...)    KN_PLACE(kn_vit_config_of(__VA_ARGS__))
#define kn_vit_config_text(...)  KN_PLACE(kn_vit_config_text(__VA_ARGS__))
#define kn_vit_config_saved(...) KN_PLACE(kn_vit_config_saved(__VA_ARGS__))
#define kn_vit_recompute(...)    KN_PLACE(kn_vit_recompute(__VA_ARGS__))

/* models/pretrained.h */
#define kn_pretrained_save_(...)   KN_PLACE(kn_pretrained_save_(__VA_ARGS__))
#define kn_pretrained_open_(...)   KN_PLACE(kn_pretrained_open_(__VA_ARGS__))
#define kn_pretrained_free(...)    KN_PLACE(kn_pretrained_free(__VA_ARGS__))
#define kn_pretrained_resnet(...)  KN_PLACE(kn_pretrained_resnet(__VA_ARGS__))
#define kn_pretrained_vit(...)     KN_PLACE(kn_pretrained_vit(__VA_ARGS__))
#define kn_pretrained_augment(...) KN_PLACE(kn_pretrained_augment(__VA_ARGS__))
#define kn_pretrained_label(...)   KN_PLACE(kn_pretrained_label(__VA_ARGS__))
#define kn_pretrained_load_(...)   KN_PLACE(kn_pretrained_load_(__VA_ARGS__))

/* models/text.h */
#define kn_text_open(...)    KN_PLACE(kn_text_open(__VA_ARGS__))
#define kn_text_encode(...)  KN_PLACE(kn_text_encode(__VA_ARGS__))
#define kn_text_map(...)     KN_PLACE(kn_text_map(__VA_ARGS__))
#define kn_text_save(...)    KN_PLACE(kn_text_save(__VA_ARGS__))
#define kn_text_free(...)    KN_PLACE(kn_text_free(__VA_ARGS__))
#define kn_text_count(...)   KN_PLACE(kn_text_count(__VA_ARGS__))
#define kn_text_vocab(...)   KN_PLACE(kn_text_vocab(__VA_ARGS__))
#define kn_text_check(...)   KN_PLACE(kn_text_check(__VA_ARGS__))
#define kn_text_hash(...)    KN_PLACE(kn_text_hash(__VA_ARGS__))
#define kn_text_batch(...)   KN_PLACE(kn_text_batch(__VA_ARGS__))
#define kn_text_loader_(...) KN_PLACE(kn_text_loader_(__VA_ARGS__))

/* models/tokenizer.h */
#define kn_tokenizer_create(...) KN_PLACE(kn_tokenizer_create(__VA_ARGS__))
#define kn_tokenizer_free(...)   KN_PLACE(kn_tokenizer_free(__VA_ARGS__))
#define kn_tokenizer_kind(...)   KN_PLACE(kn_tokenizer_kind(__VA_ARGS__))
#define kn_tokenizer_vocab(...)  KN_PLACE(kn_tokenizer_vocab(__VA_ARGS__))
#define kn_tokenizer_encode(...) KN_PLACE(kn_tokenizer_encode(__VA_ARGS__))
#define kn_tokenizer_decode(...) KN_PLACE(kn_tokenizer_decode(__VA_ARGS__))
#define kn_tokenizer_save(...)   KN_PLACE(kn_tokenizer_save(__VA_ARGS__))
#define kn_tokenizer_load(...)   KN_PLACE(kn_tokenizer_load(__VA_ARGS__))
#define kn_tokenizer_parse(...)  KN_PLACE(kn_tokenizer_parse(__VA_ARGS__))

/* models/sample.h */
#define kn_sample(...)      KN_PLACE(kn_sample(__VA_ARGS__))
#define kn_write_text_(...) KN_PLACE(kn_write_text_(__VA_ARGS__))

/* models/record.h */
#define kn_options_text(...)         KN_PLACE(kn_options_text(__VA_ARGS__))
#define kn_checkpoint_options(...)   KN_PLACE(kn_checkpoint_options(__VA_ARGS__))
#define kn_checkpoint_option(...)    KN_PLACE(kn_checkpoint_option(__VA_ARGS__))
#define kn_tokenizer_text(...)       KN_PLACE(kn_tokenizer_text(__VA_ARGS__))
#define kn_checkpoint_tokenizer(...) KN_PLACE(kn_checkpoint_tokenizer(__VA_ARGS__))

/* models/image.h */
#define kn_image_save_(...) KN_PLACE(kn_image_save_(__VA_ARGS__))

/* models/options.h */
#define kn_options_free(...)        KN_PLACE(kn_options_free(__VA_ARGS__))
#define kn_options_parse(...)       KN_PLACE(kn_options_parse(__VA_ARGS__))
#define kn_options_agree(...)       KN_PLACE(kn_options_agree(__VA_ARGS__))
#define kn_options_help_wanted(...) KN_PLACE(kn_options_help_wanted(__VA_ARGS__))
#define kn_options_help(...)        KN_PLACE(kn_options_help(__VA_ARGS__))
#define kn_options_banner(...)      KN_PLACE(kn_options_banner(__VA_ARGS__))
#define kn_options_set(...)         KN_PLACE(kn_options_set(__VA_ARGS__))
#define kn_options_derive(...)      KN_PLACE(kn_options_derive(__VA_ARGS__))
#define kn_options_restore(...)     KN_PLACE(kn_options_restore(__VA_ARGS__))
#define kn_options_given(...)       KN_PLACE(kn_options_given(__VA_ARGS__))
#define kn_options_record(...)      KN_PLACE(kn_options_record(__VA_ARGS__))
#define kn_options_command(...)     KN_PLACE(kn_options_command(__VA_ARGS__))

#endif
