"""What users of an earlier version stumbled on (U), what it read wrongly (D), and its speed (P), each with its tests.

They fail without its mending. The rest of this file holds the table to what there is.
"""

import pytest

from tests.regressions.named_tests import Tests, missing

TESTS: Tests = {
    "U1 vSphere does not work after make setup": {
        "documents/test_documents.py": ("test_every_dependency_is_locked",),
    },
    "U2 kinds that are not served are accepted": {
        "migrations/planning/test_foreseen.py": ("test_a_kind_that_is_not_served",),
        "api/test_sources.py": ("test_a_source_of_a_kind_that_is_not_served_is_refused",),
    },
    "U3 a typo costs an outage": {
        "migrations/planning/test_foreseen.py": (
            "test_a_mistake_is_said_with_its_field_and_what_would_be_right",
            "test_all_mistakes_are_said_together",
            "test_a_machine_with_more_memory_than_this_host_has_is_said_at_once",
        ),
    },
    "U4 nothing removes an ended job": {
        "api/test_removing.py": (
            "test_a_failed_job_goes_with_its_volumes",
            "test_the_command_line_removes_one",
            "test_the_page_offers_what_may_go_and_removes_it",
        ),
    },
    "U5 two jobs on one live VM": {
        "migrations/planning/test_foreseen.py": ("test_two_jobs_never_work_on_one_live_vm",),
        "migrations/planning/test_retrying.py": ("test_two_plans_for_one_vm_that_are_checked_at_once_are_not_both_taken",),
    },
    "U6 a missing driver image is found in the job": {
        "migrations/planning/test_foreseen.py": ("test_a_windows_guest_without_the_driver_image_is_said_at_once",),
        "cli/test_equals_api.py": ("test_every_field_of_a_body_has_an_option_an_argument_or_a_file",),
    },
    "U7 the command line ignores the service's settings": {
        "cli/test_config.py": (
            "test_no_given_setting_means_the_services_own_settings",
            "test_the_doctor_looks_at_what_the_service_is_set_to",
        ),
        "cli/test_equals_api.py": ("test_every_command_takes_the_shared_options",),
        "cli/test_here.py": (
            "test_each_command_asks_the_service_or_refuses_one_elsewhere",
            "test_a_service_elsewhere_is_refused",
        ),
    },
    "U8 many VMs are many plans": {"fleet/test_seeded_nights.py": ("test_the_laws_of_a_wave_hold",)},
    "U9 errors are no JSON": {"cli/migrating/test_dry_runs.py": ("test_an_error_is_json_where_json_is_asked_for",)},
    "U10 codes that are not the contract's": {
        "api/callers/test_auth.py": ("test_the_backups_have_a_code_of_their_own",),
        "api/callers/test_roles.py": ("test_a_refusal_of_the_backups_has_their_code",),
        "api/test_problems.py": ("test_no_route_and_no_method",),
    },
    "U11 backup jobs of a name or a guest twice": {
        "backups/test_service.py": (
            "test_a_job_names_guests_that_are_there_and_each_once",
            "test_two_jobs_never_have_one_name",
        ),
        "backups/restores/test_restoring.py": ("test_two_exports_of_one_name_are_never_under_way",),
    },
    "U12 HEAD, and parameters that nobody knows": {
        "api/test_strict.py": ("test_an_unknown_parameter_is_refused", "test_head_answers_as_get_without_a_body"),
    },
    "U13 a hint names an option that is not there": {
        "cli/test_commands.py": ("test_where_a_service_listens_is_an_option_of_each_that_starts_one",),
    },
    "U14 an upload of nothing": {"api/uploads/test_bodies.py": ("test_a_malformed_body_leaves_nothing",)},
    "U15 one field in two places": {"api/uploads/test_uploads.py": ("test_what_is_in_an_upload",)},
    "U16 rows of disks that are old": {
        "api/test_migrations.py": ("test_the_rows_of_disks_are_of_now_too",),
        "api/test_stream.py": ("test_the_rows_of_disks_come_with_the_figures",),
        "migrations/jobs/test_live_jobs.py": ("test_a_cancelled_job_names_no_volume_that_is_gone",),
    },
    "U17 words of another interface": {
        "cli/migrating/test_dry_runs.py": (
            "test_a_refusal_speaks_of_options",
            "test_the_words_of_the_api_as_options",
            "test_a_value_that_no_plan_may_have_is_reported_by_its_option",
            "test_a_file_that_is_nearly_called_so_is_named",
        ),
        "documents/test_mistakes.py": (
            "test_a_hint_of_the_service_names_no_command",
            "test_each_form_that_is_asked_for_has_words",
            "test_a_form_without_words_is_not_shown_as_a_regular_expression",
        ),
        "web/test_labels.py": ("test_no_text_names_a_field_of_the_api_on_a_page", "test_every_field_of_the_form_has_a_label"),
        "api/test_host_files.py": ("test_a_file_where_a_folder_is_wanted_has_a_title_that_fits",),
    },
    "U18 a URL that is taken for a file; foreign lines": {
        "cli/migrating/test_elsewhere.py": ("test_a_url_of_another_kind_is_no_local_file",),
        "real/test_service.py": ("test_the_demo_ends_by_itself_and_tidies_up",),
    },
    "U19 memory that grows": {"cli/test_startup.py": ("test_the_service_keeps_no_memory_for_what_it_does_not_do",)},
    "U20 Starting, where nothing is to start": {
        "cli/migrating/test_watching.py": ("test_of_a_guest_that_is_not_to_be_started_nothing_says_that_it_starts",),
    },
    "U21 a database in another encoding": {
        "store/test_store.py": ("test_a_database_in_another_encoding_is_said_at_the_start",),
    },
    "U22 tests in a checkout beneath root's home": {"cli/test_client.py": ("test_the_socket_of_another_user",)},
    "D1 a declaration that the bytes contradict": {
        "offline/test_described_wrong.py": ("test_the_bytes_are_believed_over_the_declaration",),
    },
    "D2 a paravirtualised guest": {
        "offline/test_described_wrong.py": (
            "test_a_paravirtualised_guest",
            "test_a_paravirtualised_guest_by_its_boot_loader",
        ),
    },
    "D3 a CD image": {"offline/test_described_wrong.py": ("test_a_cd_image_is_no_hard_disk",)},
    "D4 raw disks of oVirt": {
        "offline/test_described_wrong.py": (
            "test_a_raw_disk_of_ovirt_is_read",
            "test_a_lun_of_ovirt_is_never_a_blank_disk",
        ),
    },
    "D5 a capacity of the collection": {
        "offline/test_described_wrong.py": ("test_a_capacity_that_is_a_property_of_the_collection",),
    },
    "D6 an export named by its configuration": {
        "offline/test_described_wrong.py": (
            "test_an_export_of_hyper_v_is_a_whole_folder_whichever_file_names_it",
            "test_an_export_of_hyper_v_by_its_configuration_outside_the_import_root",
        ),
        "offline/hyperv/test_vmcx_export.py": ("test_a_missing_disk_says_which",),
    },
    "D7 an NVDIMM": {"offline/test_described_wrong.py": ("test_an_nvdimm_is_a_disk_that_an_item_names",)},
    "D8 memory without a quantity": {"offline/test_described_wrong.py": ("test_a_memory_item_without_a_quantity",)},
    "D9 smaller ones, and images that were cut off": {
        "offline/test_described_wrong.py": ("test_a_vmx_without_memory", "test_two_items_of_one_disk_are_reported"),
        "disks/qcow2/test_qcow2.py": ("test_a_file_that_is_cut_off_is_never_read_as_zeros",),
        "disks/test_vdi.py": ("test_a_file_cut_off_anywhere_is_refused",),
        "disks/vhd/test_vhd.py": ("test_a_file_cut_off_anywhere_is_refused",),
        "disks/vmdk/test_vmdk_refused.py": ("test_a_file_cut_off_anywhere_is_refused",),
        "disks/nbd/test_qemu_nbd.py": ("test_a_header_that_is_cut_off",),
        "disks/nbd/test_fallback.py": (
            "test_an_image_that_ends_before_its_tables_do_is_refused",
            "test_a_file_that_lost_the_bytes_of_its_format_is_no_raw_disk",
        ),
    },
    "P1 figures of the documents that are not true any more": {
        "packaging/test_bench.py": (
            "test_a_table_is_written_between_the_marks_alone",
            "test_the_documents_have_their_marks",
            "test_figures_say_what_they_are_of",
            "test_what_others_do_is_reported_from_what_we_do",
        ),
    },
    "P2 half a second before the first byte": {
        "cli/test_startup.py": (
            "test_an_image_waits_for_what_it_needs_alone",
            "test_what_a_guest_may_wait_for_waits_for_no_importer_and_no_model",
            "test_the_help_of_all_commands_is_quick",
        ),
    },
    "P3 a loss of speed that nothing sees": {
        "packaging/test_bench.py": (
            "test_a_copy_that_costs_a_fifth_more_ends_badly",
            "test_a_loss_fails_on_the_processor_that_the_bounds_are_of",
        ),
    },
    "P4 backups that cost more than those of others": {
        "packaging/test_bench.py": ("test_a_restore_takes_six_tenths_of_restics_time",),
    },
}


@pytest.mark.parametrize(("letter", "last"), [("U", 22), ("D", 9), ("P", 4)])
def test_each_stumble_has_its_tests(letter: str, last: int) -> None:
    numbers = [name.split()[0] for name in TESTS if name.startswith(letter)]
    assert numbers == [f"{letter}{number}" for number in range(1, last + 1)]
    assert missing(TESTS) == []
